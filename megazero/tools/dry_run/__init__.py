"""Run one rank of any number without data or others."""
