"""ZeRO-R: activations that are recomputed, split over ranks, kept in one buffer, or moved to the host."""
