"""Small models for tests, with memory of their own and no engine: gradients arrive in `.grad`."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from megazero.comm.grid import Axis
from megazero.kernels.operations import REFERENCE, Operations
from megazero.model.batch_context import BatchContext
from megazero.model.parameter import declaration_of
from megazero.model.transformer import Shape, Transformer

GPT = Shape(
    layers=2,
    hidden=48,
    heads=4,
    kv_heads=4,
    ffn=192,
    vocab=97,
    seq_len=16,
    position="learned",
    norm="layernorm",
    activation="gelu",
    dropout=0.0,
    tie_embeddings=True,
    norm_eps=1e-5,
)
LLAMA = replace(
    GPT, kv_heads=2, ffn=80, position="rotary", norm="rmsnorm", activation="swiglu", tie_embeddings=False, norm_eps=1e-6
)


def make(
    shape: Shape,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    ops: Operations = REFERENCE,
    tensor: Axis | None = None,
    sequence: bool = False,
    loss_chunk: int = 0,
) -> Transformer:
    """The model, or a tensor rank's part of it, with its initial values."""
    model = Transformer(
        shape, seed=seed, tensor=tensor or Axis("tensor"), sequence=sequence, ops=ops, loss_chunk=loss_chunk
    )
    for name, parameter in list(model.named_parameters()):
        declaration = declaration_of(parameter)
        values = declaration.initial(seed, name, 0, math.prod(declaration.local_shape))
        new = nn.Parameter(values.to(dtype).view(declaration.local_shape))
        vars(new).update(vars(parameter))
        torch.utils.swap_tensors(parameter, new)
    return model


def batch(shape: Shape, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens and targets [S, B], all valid."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(0, shape.vocab, (shape.seq_len + 1, rows), generator=generator)
    return window[:-1].clone(), window[1:].clone(), torch.ones(shape.seq_len, rows, dtype=torch.bool)


def step_of(rows: int, step: int = 0) -> BatchContext:
    return BatchContext(step, torch.arange(rows) + rows * step)
