"""Predict what a job needs before it runs, and find the fastest layout that fits."""
