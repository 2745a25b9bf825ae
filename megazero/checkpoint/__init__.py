"""Write a run's state to checkpoints, and read it back."""
