"""Run a model in stages on the ranks of the pipeline axis, by a schedule's actions, with messages between stages."""
