"""Run one rank of any number, without data and without the other ranks."""
