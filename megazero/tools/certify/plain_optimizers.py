"""Update parameters independently of the package, in fp64, from the papers: AdamW, Muon, Lion, SGD.

This file imports nothing of `optim/`; docs/optimizers.md has the formulas and their sources.
"""

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
import xxhash
from torch import Tensor

from megazero.config.schema import Config, Model, Optimizer, OptimizerGroup
from megazero.kernels import counter

KINDS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",), "lion": ("exp_avg",), "sgd": ("velocity",)}


def group_of(name: str, o: Optimizer) -> OptimizerGroup:
    """Return the first group that matches a parameter, or an empty one."""
    return next((own for own in o.groups or () if fnmatchcase(name, own.match)), OptimizerGroup(match=""))


def kinds_of(name: str, value: Tensor, o: Optimizer) -> tuple[str, ...]:
    """Return the names of the values that are kept for a parameter."""
    return KINDS[chosen(name, value, o)] + ("average",) * (o.average.kind == "ema")


def chosen(name: str, value: Tensor, o: Optimizer) -> str:
    """Return the name of a parameter's optimizer: Muon only for matrices inside of blocks."""
    asked = group_of(name, o).name or o.name
    return "adamw" if asked == "muon" and not (name.startswith("blocks.") and value.dim() == 2) else asked


def clip_factors(gradients: Mapping[str, Tensor], o: Optimizer) -> dict[str, float]:
    """Return the factor of each gradient: of its group's clip, else of the clip of all others together."""

    def limit(name: str) -> tuple[str, float]:
        own = group_of(name, o)
        return ("", o.clip) if own.clip is None else (own.match, own.clip)

    squares: dict[str, float] = {}
    for name, gradient in gradients.items():
        key = limit(name)[0]
        squares[key] = squares.get(key, 0.0) + float(gradient.square().sum())
    found = {}
    for name in gradients:
        key, most = limit(name)
        found[name] = min(1.0, most / (math.sqrt(squares[key]) + 1e-6)) if most else 1.0
    return found


def update(
    name: str,
    value: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    n: int,
    o: Optimizer,
    m: Model,
    *,
    bf16: bool,
) -> None:
    """Update a parameter and its state, in place.

    Args:
        n: the number of updates, this one included.
        bf16: matrices are orthogonalised in bf16.
    """
    own, which, (b1, b2) = group_of(name, o), chosen(name, value, o), o.betas
    if o.clip_value is not None:
        gradient = gradient.clamp(-o.clip_value, o.clip_value)
    rate = o.lr * (1.0 if own.lr_factor is None else own.lr_factor)
    decays = value.dim() == 2 and "positions" not in name
    decay = own.weight_decay if own.weight_decay is not None else o.weight_decay if decays else 0.0
    if which == "adamw":
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.copy_(b1 * first + (1 - b1) * gradient)
        second.copy_(b2 * second + (1 - b2) * gradient**2)
        step = first / (1 - b1**n) / ((second / (1 - b2**n)).sqrt() + o.eps)
    elif which == "lion":
        average = state["exp_avg"]
        step = torch.sign(b1 * average + (1 - b1) * gradient)
        average.copy_(b2 * average + (1 - b2) * gradient)
    elif which == "sgd":
        state["velocity"].copy_(b1 * state["velocity"] + gradient)
        step = state["velocity"]
    else:
        momentum, b = state["momentum"], o.muon.momentum
        momentum.copy_(b * momentum + (1 - b) * gradient)
        wanted = b * momentum + (1 - b) * gradient if o.muon.nesterov else momentum
        step, rate = _orthogonal(name, wanted, o, m, bf16=bf16), rate * o.muon.lr_factor
    value *= 1 - rate * decay
    value -= rate * step
    if "average" in state:  # the mean of all values so far, until its decay rate is reached
        kept = min(o.average.decay, 1 - 1 / n)
        state["average"].copy_(kept * state["average"] + (1 - kept) * value)


def round_to_rest(name: str, value: Tensor, state: Mapping[str, Tensor], n: int, config: Config) -> None:
    """Round a parameter and its state after update n to the dtypes in which they rest, in place."""
    dtype, narrow = config.precision.dtype, config.optimizer.moments == "bf16"
    for kind, values in {"masters": value, **state}.items():
        if dtype != "fp64" and (config.precision.masters == "none" if kind == "masters" else narrow):
            own = (xxhash.xxh64_intdigest(text.encode()) for text in (name, kind))
            words = counter.words(counter.derive_key(config.run.seed, *own), 0, values.numel(), torch.tensor(n))
            low = values.float().view(torch.int32) + (words % 2**16).view(values.shape)
            values.copy_((low - low % 2**16).view(torch.float32))
        elif dtype != "fp64" and kind == "masters":
            values.copy_(values.float())


def _orthogonal(name: str, wanted: Tensor, o: Optimizer, m: Model, *, bf16: bool) -> Tensor:
    """Return a parameter's matrices orthogonalised, each by itself, and scaled."""
    found = torch.empty_like(wanted)
    inputs_first = name.endswith(("attention.out.weight", "mlp.down.weight"))
    for rows in _matrices(name, len(wanted), m):
        matrix = wanted[rows].T if inputs_first else wanted[rows]
        x = matrix.bfloat16() if bf16 else matrix
        turned = x.shape[0] > x.shape[1]
        x = x.T if turned else x
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(o.muon.steps):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        outputs, inputs = matrix.shape
        scale = 0.2 * math.sqrt(max(outputs, inputs)) if o.muon.scale == "rms" else math.sqrt(max(1, outputs / inputs))
        y = scale * (x.T if turned else x).double()
        found[rows] = y.T if inputs_first else y
    return found


def _matrices(name: str, rows: int, m: Model) -> Iterator[Tensor]:
    """Yield the row numbers of each matrix: those of queries, keys and values take turns for each key-value head."""
    if not name.endswith("attention.qkv.weight"):
        yield torch.arange(rows)
        return
    groups = m.kv_heads or m.heads
    queries = m.heads // groups
    heads = torch.arange(rows).view(groups, queries + 2, rows // (groups * (queries + 2)))
    yield heads[:, :queries].reshape(-1)
    yield heads[:, queries].reshape(-1)
    yield heads[:, queries + 1].reshape(-1)
