"""Compare every layout of a config with one process."""
