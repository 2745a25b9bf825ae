"""Serve the keys and values by which ranks under SLURM meet: a server, its clients, and their authentication."""
