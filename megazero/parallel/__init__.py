"""The grid of ranks: axes, collectives, conjugate regions, launch."""
