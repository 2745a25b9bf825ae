"""ZeRO-R: recompute activations, partition them over ranks, keep them in one buffer, or offload them."""
