"""The model: a for-loop over blocks that knows nothing of ZeRO, recompute or pipeline."""
