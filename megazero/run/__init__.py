"""Give one training run its folder, lock, logs, checkpoints and messages."""
