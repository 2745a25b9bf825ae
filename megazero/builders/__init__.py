"""Build the objects of a run from a checked config, in the order in which they are needed."""
