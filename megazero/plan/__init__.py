"""Closed formulas for a model's parameters, arithmetic, memory, traffic and time, computed without building it."""
