"""Train: the training loop, validation, and the decision to stop."""
