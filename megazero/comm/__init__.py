"""Communicate between ranks along the axes of a grid, and count what is sent."""
