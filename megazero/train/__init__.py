"""Train: the loop, validation, and when to stop."""
