"""Pipeline schedules as data: lists of actions that can be printed, parsed, lowered, simulated and drawn. No torch."""
