"""Make objects from a checked config, in the order in which they are needed."""
