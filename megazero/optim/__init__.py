"""Update parameters: AdamW, clipping, the loss scale, learning rates, delayed updates."""
