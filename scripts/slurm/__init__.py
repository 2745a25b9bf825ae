"""Batch scripts for SLURM, and the Python programs that they call."""
