"""Run one rank of any number of ranks, without data and without the other ranks."""
