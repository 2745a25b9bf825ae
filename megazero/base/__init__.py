"""Provide helpers for every package: errors, files, reading of untrusted input, the heartbeat, terminal output."""
