"""The verbs that no training run needs."""
