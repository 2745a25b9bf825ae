"""Update parameters: AdamW, gradient clipping, loss scaling, learning rate schedules, delayed updates."""
