"""Closed formulas: what a model costs in parameters, arithmetic, memory, traffic and time, without building it."""
