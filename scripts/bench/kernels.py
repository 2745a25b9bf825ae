"""Compare the CPU kernels with the memory bandwidth, their specification and torch: AdamW, and `operations.py`.

    python scripts/bench/kernels.py [--launches 3] [--pairs 21] [--json] [--save]

AdamW of 16-bit parameters, as the host does it: one thread, 16.8M parameters, ten updates a step. An update with fp32
gradients reads masters, gradients and both moments and writes masters, moments and the rounded parameters: 30 bytes per
parameter, or 28 with bf16 gradients. *limit* is an in-place pass (x *= a, fp32) over 30 bytes per parameter: the
fastest way to read and write memory. A ratio of 1.11 to it means 0.90 of its speed. torch's way is its fused kernel and
a copy (38 bytes), with bf16 gradients widened first (48).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megazero.kernels import cpu, schema
from scripts.bench import operations
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.processes import Call, System

PARAMETERS, UPDATES, BYTES = 1 << 24, 10, 30
GRADIENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LR, DECAY, EPS, BETAS = 1e-4, 0.1, 1e-8, (0.9, 0.95)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    return run(groups_of(options.only), options)


def groups_of(only: list[str]) -> Iterator[Group]:
    """Yield the group of AdamW, then one group of other operations per dtype."""
    systems = [System("limit", limit, has_loss=False)]
    for name in GRADIENTS:
        systems.append(System(f"ours, {name} gradients", ours, (name,), has_loss=False))
        systems.append(System(f"torch, {name} gradients", torch_route, (name,), has_loss=False))
    yield Group("AdamW", chosen(systems, only))
    for dtype in operations.DTYPES:
        yield operations.group_of(dtype)


def limit() -> Call:
    """Return ten in-place passes over as many bytes as an update with fp32 gradients moves."""
    x = torch.ones(BYTES * PARAMETERS // 8)

    def step() -> float:
        for _ in range(UPDATES):
            x.mul_(0.999)
        return 0.0

    return step


def ours(gradients: str) -> Call:
    """Return ten updates by our kernel."""
    cpu.load()
    update = getattr(torch.ops, schema.NAMESPACE).adamw_
    masters, first, second, grads, published = _state(gradients)
    step_count, divide_by, skip = torch.zeros(()), torch.ones(()), torch.zeros(())

    def step() -> float:
        for _ in range(UPDATES):
            update(
                *(masters, grads, first, second, published),
                *(step_count, divide_by, skip),
                *(LR, *BETAS, EPS, DECAY),
            )
        return 0.0

    return step


def torch_route(gradients: str) -> Call:
    """Return ten updates by torch's fused AdamW, each with a copy to the 16-bit parameters."""
    masters, first, second, grads, published = _state(gradients)
    step_count, divide_by, skip = torch.zeros(()), torch.ones(()), torch.zeros(())
    widened = grads if grads.dtype == torch.float32 else torch.empty(PARAMETERS)

    def step() -> float:
        for _ in range(UPDATES):
            if widened is not grads:
                widened.copy_(grads)
            adamw(
                *([masters], [widened], [first], [second], [], [step_count]),
                fused=True,
                grad_scale=divide_by,
                found_inf=skip,
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                maximize=False,
                lr=LR,
                weight_decay=DECAY,
                eps=EPS,
            )
            published.copy_(masters)
        return 0.0

    return step


def _state(gradients: str) -> tuple[Tensor, ...]:
    """Return masters, both moments, gradients and 16-bit parameters; every page is touched."""
    masters, first, second = torch.full((PARAMETERS,), 0.5), torch.zeros(PARAMETERS), torch.zeros(PARAMETERS)
    return masters, first, second, torch.full((PARAMETERS,), 1e-3, dtype=GRADIENTS[gradients]), masters.bfloat16()


if __name__ == "__main__":
    sys.exit(main())
