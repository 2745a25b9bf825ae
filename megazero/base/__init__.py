"""Hold what every package may use: errors, files, reading of foreign input, the heartbeat, terminal output."""
