"""Pipeline schedules as data: lists of actions that can be printed, lowered, simulated and drawn. Imports no torch."""
