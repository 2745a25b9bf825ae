"""The operations that models and engine compute with: their specification in torch, kernels, random numbers."""
