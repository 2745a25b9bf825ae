"""Compute a few training steps independently of the package, as a reference for one process.

Every layout and the one process run the same model, optimizer, clipping and quantisation, so a fault in these is equal
on both sides of a comparison. This file imports nothing of them. It is plain torch in fp64: forward (`plain_model.py`)
and optimizers written from the papers (`plain_optimizers.py`; `torch.optim` would import a compiler in every rank), and
autograd.
It shares the random numbers (`kernels/counter.py`, with vectors in docs/numerics.md) and the text, which it reads as
tokens with each token's document number.

    follow          trains the config's model
    reduced_sums    sums gradients that are sent as integers, from each rank's gradients before (docs/zero.md)
    codes_meaning   quantises values and dequantises their codes

Shapes: B samples, S sequence.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.schema import Config
from megazero.data.mixture import Mixture
from megazero.kernels import counter
from megazero.tools.certify.plain_model import Text, initial, losses
from megazero.tools.certify.plain_optimizers import clip_factors, kinds_of, round_to_rest, update
from megazero.tools.certify.rank import OVERFLOW, SCALE, Results, digest_of

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK = 256  # values that share a scale


def _read(mixture: Mixture, ids: np.ndarray, documents: bool) -> Text:
    """Read samples; with `documents`, a token's attention, position and target stay within its document."""
    reads = [mixture.sources[k].windows.read(int(window)) for k, window in zip(*mixture.locate(ids), strict=True)]
    tokens = torch.tensor(np.stack([read.tokens for read in reads]))
    of = torch.tensor(np.stack([read.ordinals for read in reads])) if documents else torch.zeros_like(tokens)
    valid = of[:, 1:] == of[:, :-1]
    for row, read in zip(valid, reads, strict=True):
        row &= torch.tensor(read.scored[1:])
    of = of[:, :-1]
    same = of[:, :, None] == of[:, None, :]
    positions = torch.arange(of.shape[1]) - same.int().argmax(-1)  # minus the position of the document's first token
    return Text(torch.tensor(ids), tokens[:, :-1], tokens[:, 1:], valid, positions, same.tril())


def follow(config: Config, mixture: Mixture, steps: int, *, late: bool) -> Results:
    """Train with the certificate's settings, and return the expected results of one process.

    Weights are rounded to the precision in which they rest, and to the config's dtype for forward and backward. All
    else is fp64.

    Args:
        late: forward uses weights that lack the last update (`zero.offload.delayed`).
    """
    dtype, size = _DTYPES[config.precision.dtype], config.batch.global_
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    wide = dtype if config.precision.masters == "none" else wide
    masters = {name: value.to(wide).double() for name, value in initial(config).items()}
    first = {name: value.clone().flatten() for name, value in masters.items()}
    results = Results([], [], {}, {}, shapes={name: list(value.shape) for name, value in masters.items()})
    o, updates = config.optimizer, 0
    state = {n: {kind: torch.zeros_like(v) for kind in kinds_of(n, v, o)} for n, v in masters.items()}

    def rounded() -> dict[str, Tensor]:
        return {name: value.clone().to(dtype) for name, value in masters.items()}

    def note(kind: str, values: Mapping[str, Tensor]) -> None:
        results.stored.update({f"{kind}/{name}": value.clone() for name, value in values.items()})

    published, scale = rounded(), SCALE if dtype == torch.float16 else 1.0
    note("initial", published)
    for step in range(steps):
        text = _read(mixture, np.arange(step * size, (step + 1) * size), config.data.mask_eod)
        seen = {name: value.double().requires_grad_() for name, value in published.items()}
        loss = _backward(seen, config, text, step)
        for name, value in masters.items():
            value.grad = seen[name].grad
        if step == 0:
            note("gradient", {name: value.grad for name, value in masters.items() if value.grad is not None})
        gradients = {name: value.grad for name, value in masters.items() if value.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values()).item()
        factors = clip_factors(gradients, o)
        published = rounded()  # the next forward uses these if updates are late
        skipped = dtype == torch.float16 and step == OVERFLOW
        if skipped:
            scale /= 2
        else:
            updates += 1
            for name, value in masters.items():
                gradient = gradients[name] * factors[name]
                update(name, value, gradient, state[name], updates, o, config.model, bf16=dtype == torch.bfloat16)
                round_to_rest(name, value, state[name], updates, config)
        if not late or step + 1 == steps:
            published = rounded()
        note(f"weight/{step}", published)
        results.losses.append(loss)
        results.norms.append(norm)
        results.skips.append([skipped, scale])
        rows = zip(text.ids.tolist(), text.tokens, text.targets, text.valid, strict=True)
        results.samples.append([(id_, digest_of(*row)) for id_, *row in rows])
    for number, (name, value) in enumerate(masters.items()):
        results.held.append((name, 0, value.numel()))
        kept = {"first": first[name], "weight": value, **state[name]}
        results.stored.update({f"{kind}/{number}": each.flatten().clone() for kind, each in kept.items()})
    return results


def _backward(seen: Mapping[str, Tensor], config: Config, text: Text, step: int) -> float:
    """Accumulate the gradients of the mean loss over valid targets in the weights `seen`; return the mean loss."""
    m, total, positions = config.model, 0.0, torch.arange(text.tokens.shape[1])
    for rows in torch.arange(len(text.ids)).split(config.batch.micro or 1):
        part = Text(*(each[rows] for each in text))

        def dropped(x: Tensor, layer: int, site: int, ids: Tensor = part.ids) -> Tensor:
            if not m.dropout:
                return x
            key = counter.derive_key(config.run.seed, step, layer, site)
            keep = counter.keep_mask(key, ids, positions, torch.arange(m.hidden), m.dropout)
            return x * keep.transpose(0, 1) / (1 - m.dropout)

        loss = (losses(seen, m, part, dropped) * part.valid).sum() / text.valid.sum()
        loss.backward()
        total += loss.item()
    return total


def codes_meaning(x: Tensor, bits: int) -> Tensor:
    """Quantise and dequantise flat values: in each block, the nearest of 2^bits - 1 multiples of a scale, in fp32.

    The scale is the largest magnitude of the block over 2^(bits - 1) - 1. A block with infinities or NaN becomes NaN.
    """
    most_code, blocks = 2.0 ** (bits - 1) - 1, F.pad(x.float(), (0, -len(x) % _BLOCK)).view(-1, _BLOCK)
    most = blocks.abs().amax(1, keepdim=True)
    inverse = torch.full_like(most, most_code) / most  # torch rounds a Python number divided by a tensor twice
    codes = torch.where(most < 1e-35, 0.0, (blocks * inverse).round())
    return (codes * torch.where(most.isinf(), torch.nan, most / most_code)).flatten()[: len(x)]


class Sent(NamedTuple):
    """One reduction of a unit on one rank: its own flat gradients; whether the sum was added to the one before."""

    gradients: Tensor
    accumulate: bool


def reduced_sums(sent: Sequence[Sequence[Sent]], bits: int, near: int, feedback: bool) -> Iterator[list[Tensor]]:
    """Yield for each reduction each rank's part of the sum, computed from all ranks' gradients.

    A rank adds to its own summand the dequantised codes of the others, in rank order, in the dtype of the gradients.

    Args:
        sent: each rank's gradients for each reduction: [reduction][rank].
        near: number of neighbouring ranks: if fewer than all, sums are exchanged among neighbours first, then between
            groups of neighbours.
        feedback: quantisation errors are added to the next values that are sent.
    """
    ranks, lost = len(sent[0]), dict[tuple[int, ...], Tensor]()
    sums: list[Tensor] = []

    def coded(x: Tensor, *way: int) -> Tensor:
        x = x + lost.get(way, 0.0)
        meaning = codes_meaning(x, bits)
        if feedback:
            lost[way] = (x - meaning.to(x.dtype)).nan_to_num(0.0, 0.0, 0.0)
        return meaning

    def added(total: Tensor, others: Iterator[Tensor]) -> Tensor:
        for other in others:
            total = (total + other).to(sent[0][0].gradients.dtype)
        return total

    for reduction in sent:
        parts = [list(each.gradients.chunk(ranks)) for each in reduction]  # [from][to]
        if near < ranks:
            for to in range(ranks):
                hosts = [range(first, first + near) for first in range(0, ranks, near)]
                came = [
                    [coded(parts[k][to], k, to, 1) if k % near != to % near else None for k in host] for host in hosts
                ]
                for host, of_host in zip(hosts, came, strict=True):
                    own = host[to % near]
                    parts[own][to] = added(parts[own][to], (x for x in of_host if x is not None))
        before, sums = sums, []
        for to in range(ranks):
            others = [k for k in range(ranks) if k != to and (near == ranks or k % near == to % near)]
            own = parts[to][to] if not reduction[to].accumulate else before[to] + parts[to][to]
            sums.append(added(own, (coded(parts[k][to], k, to, 2) for k in others)))
        yield sums
