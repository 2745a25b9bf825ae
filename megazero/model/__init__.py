"""The model: a for-loop over blocks, independent of ZeRO, recomputation and pipeline parallelism."""
