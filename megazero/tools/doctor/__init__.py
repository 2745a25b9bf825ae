"""Measure this machine, and say what training on it lacks."""
