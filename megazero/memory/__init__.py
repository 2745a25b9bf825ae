"""ZeRO-R: activations that are computed again, split over ranks, kept in one place, or moved to the host."""
