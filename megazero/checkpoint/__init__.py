"""What is written of a run's weights, and read back."""
