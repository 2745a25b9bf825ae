"""Run a model's stages on the ranks of the pipeline axis: execute a schedule's actions, send tensors between stages."""
