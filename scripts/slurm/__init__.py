"""Batch scripts for SLURM, and what they ask Python."""
