"""Read, check and explain configs: every option, and which of them go together."""
