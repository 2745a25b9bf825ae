"""Measure this machine, and report what it lacks for training."""
