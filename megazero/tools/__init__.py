"""Hold the verbs that no training run needs."""
