"""Hold what every room may use: errors, files, reading of foreign input, the heartbeat, lines for people."""
