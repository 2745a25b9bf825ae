"""megazero: ZeRO-100B and Megatron-style 3D parallelism for GPT training. Importing it imports nothing else."""

__version__ = "0.1.0"
