"""Carry tensors and words between ranks, along the axes of a grid; count what is sent."""
