"""A model in stages on the ranks of the pipeline axis: cut, run by a schedule's actions, joined by messages."""
