"""Check and time attention: the run's own choice, and each of torch's implementations, forward and backward.

Heads and layouts are those of the models that `steps.py` trains: q, k and v are views into one projection. The error is
the largest over the output and the three gradients of the first sample, each relative to the largest of its fp64
values. Times are those of the whole batch.

Allowed in bf16: scores, probabilities and (in backward) their gradients are rounded by 2^-9 before a product, as are
inputs and results. These are about eight roundings: 2^-6.
"""

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.kernels.timing import medians
from megazero.model.attention import VariableLength
from megazero.run.attention import Heads, Probe, choose_attention, take
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.steps import GPT, LLAMA, SEVEN_B

NAMES = ("cudnn", "flash", "efficient", "math")
MODELS = {"GPT-2 1.5B, micro 8": (GPT, 8), "Llama 3.2 1B, micro 4": (LLAMA, 4), "Llama 2 7B, micro 1": (SEVEN_B, 1)}
ALLOWED = 2.0**-6
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows(asked: Asked) -> Iterator[Row]:
    """Yield, for the heads of each model, the choice of a run, then each implementation."""
    for name, (shape, micro) in MODELS.items():
        m = shape.of(asked).model
        heads = Heads(m["heads"], m["kv_heads"], m["hidden"] // m["heads"], m["seq_len"])
        yield from _of_model(name, heads, micro, asked)


def _of_model(name: str, heads: Heads, micro: int, asked: Asked) -> Iterator[Row]:
    dtype = torch.bfloat16
    if asked.on_gpu:
        probe = Probe(asked.device, dtype, heads)
        for how in ({"documents": False, "deterministic": False}, {"documents": True, "deterministic": True}):
            choice = choose_attention(probe, **how, windows=False)
            words = "documents, deterministic" if how["documents"] else "a run"
            varlen = choice.variable_length is not None
            yield {"name": f"{name}: {words} takes", "choice": str(choice), "varlen": str(varlen), "why": choice.why}
    qkv, grad = _inputs(heads, micro, asked.device, dtype)
    truth = _results(_plain, qkv[:, :1].double(), grad[:, :1].double(), heads)
    for each, attend in systems(heads, asked).items():
        row: Row = {"name": f"{name}: {each}"}
        try:
            found = _results(attend, qkv[:, :1], grad[:, :1], heads)
            error = max(_distance(*pair) for pair in zip(found, truth, strict=True))
            (seconds,) = medians([lambda attend=attend: _results(attend, qkv, grad, heads)], asked.device)
            row |= {"error": error, "us": seconds * 1e6 if isinstance(seconds, float) else seconds}
            if not error <= ALLOWED:
                row["fault"] = f"error {error:.1e}, allowed {ALLOWED:.1e}"
        except torch.OutOfMemoryError:
            row["absent"] = "does not fit into the memory"
        except Exception as error:  # an implementation that does not support these heads
            traceback.print_exc()
            row["absent"] = error_line(error)
        yield row


def systems(heads: Heads, asked: Asked) -> dict[str, Attend]:
    """Return the implementations by name; on a CPU only one."""
    if not asked.on_gpu:
        return {"math": _plain}
    found: dict[str, Attend] = {name: partial(_taking, name) for name in NAMES}
    if heads.queries != heads.keys:
        found |= {f"{name}, repeated keys": partial(_taking, name, repeats=True) for name in NAMES}
    try:
        found["varlen"] = _varlen(Probe(asked.device, torch.bfloat16, heads).variable_length(windows=False))
    except (RuntimeError, ValueError, ImportError):
        traceback.print_exc()
    return found


def _taking(name: str, q: Tensor, k: Tensor, v: Tensor, *, repeats: bool = False) -> Tensor:
    take(name)
    if repeats:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


_plain: Attend = partial(_taking, "math")


def _varlen(attend: VariableLength) -> Attend:
    """Return variable-length attention on samples of one document each."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, length, _ = q.shape
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
        return attend(q, k, v, bounds, length, None, q.shape[-1] ** -0.5).unflatten(0, (batch, length)).transpose(1, 2)

    return call


def _inputs(heads: Heads, micro: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a projection [S, B, G (Q + 2) d], and the gradient of the output [S, B, H, d]."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    width = heads.keys * (heads.queries // heads.keys + 2) * heads.channels
    return draw(heads.seq_len, micro, width), draw(heads.seq_len, micro, heads.queries, heads.channels)


def _results(attend: Attend, qkv: Tensor, grad: Tensor, heads: Heads) -> list[Tensor]:
    """Return the output, and the gradients of q, k and v, which are views into the projection."""
    qkv, group = qkv.detach().requires_grad_(), heads.queries // heads.keys
    parts: Any = qkv.view(*qkv.shape[:2], heads.keys, group + 2, heads.channels)
    q, k, v = parts.split((group, 1, 1), dim=3)
    y = attend(*(each.flatten(2, 3).permute(1, 2, 0, 3) for each in (q, k, v)))
    (d,) = torch.autograd.grad(y.permute(2, 0, 1, 3), qkv, grad)
    return [y.detach(), *d.view(parts.shape).split((group, 1, 1), dim=3)]


def _distance(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).abs().max() / truth.abs().max())
