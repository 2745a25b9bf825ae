"""The CPU's kernels beside the memory's speed and beside torch: first AdamW, then every other (`operations.py`).

    python scripts/bench/kernels.py [--pairs 15] [--json]

AdamW of 16-bit parameters, as the host does it: one thread, 16.8M parameters, ten updates a step. An update with fp32
gradients reads masters, gradients and both moments and writes masters, moments and the rounded parameters: 30 bytes a
parameter; with bf16 gradients 28. *limit* is an in-place pass (x *= a, fp32) over as many bytes, 30 for each parameter,
the fastest that reads and writes memory; a ratio to it of 1.11 is 0.90 of its speed. torch's route is its fused kernel
and a copy (38 bytes), with bf16 gradients widened first (48).
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megazero.kernels import cpu, schema
from scripts.bench.harness import System, compare, present, report
from scripts.bench.operations import rows, table

PARAMETERS, UPDATES, BYTES = 1 << 24, 10, 30
GRADIENTS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LR, DECAY, EPS, BETAS = 1e-4, 0.1, 1e-8, (0.9, 0.95)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    systems = [System("limit", limit, (), 1, exchanges=False)]
    for name in GRADIENTS:
        systems.append(System(f"ours, {name} gradients", ours, (name,), 1, exchanges=False))
        systems.append(System(f"torch, {name} gradients", torch_route, (name,), 1, exchanges=False))
    comparison = compare(systems[0], systems[1:], options.pairs)
    rate = BYTES * PARAMETERS * UPDATES / comparison.reference_s / 1e9
    found = []
    for row in rows(options.pairs):
        found.append(row)
        print(f"{row.dtype} {row.operation}: {row.of_limit:.2f} of the limit", file=sys.stderr, flush=True)
    if options.json:
        adamw_report = report(comparison, comparison.reference_s)
        print(json.dumps(adamw_report | {"operations": [asdict(row) for row in found]}, indent=1))
    else:
        present([(f"limit {rate:.1f} GB/s", comparison.reference_s, comparison)], False)
        print(table(found))
    return 0


def limit() -> Callable[[], float]:
    x = torch.ones(BYTES * PARAMETERS // 8)

    def step() -> float:
        for _ in range(UPDATES):
            x.mul_(0.999)
        return 0.0

    return step


def ours(gradients: str) -> Callable[[], float]:
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


def torch_route(gradients: str) -> Callable[[], float]:
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
    """Return masters, moments, gradients, parameters; every page touched."""
    masters, first, second = torch.full((PARAMETERS,), 0.5), torch.zeros(PARAMETERS), torch.zeros(PARAMETERS)
    return masters, first, second, torch.full((PARAMETERS,), 1e-3, dtype=GRADIENTS[gradients]), masters.bfloat16()


if __name__ == "__main__":
    sys.exit(main())
