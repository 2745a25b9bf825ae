"""Operations of models and engine: their specification in plain torch, fused kernels, and random numbers."""
