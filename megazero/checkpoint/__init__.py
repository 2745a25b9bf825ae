"""Write and read checkpoints of a run."""
