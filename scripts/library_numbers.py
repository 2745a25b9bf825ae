"""Train a small module under `megazero.shard` and print all numbers except times, as one line of JSON.

    python scripts/library_numbers.py RANKS OPTIONS     # OPTIONS: JSON of keyword arguments of `megazero.shard`

`scripts/same_numbers.py` runs this with the code of two trees.
"""

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

import megazero

STEPS, ROWS, WIDTH, WORDS = 3, 4, 24, 50


class Residual(nn.Module):
    """A residual MLP block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))


class Model(nn.Module):
    """A small model of residual blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained(options: dict[str, Any]) -> dict[str, Any]:
    """Train each rank on its own rows; return losses, norms, hashes of final values, memory and traffic."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        model = Model().double() if options.get("precision") is None else Model()
    sharded = megazero.shard(model, "adamw", clip=0.5, **options)
    draw = torch.Generator().manual_seed(sharded.rank)
    rows = []
    for _ in range(STEPS):
        for last in (False, True):
            ids = torch.randint(0, WORDS, (ROWS, 9), generator=draw)
            logits = sharded(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / 2
            sharded.backward(loss, last=last)
            rows.append(loss.item())
        result = sharded.step(1e-2)
        rows.append(float(result.grad_norm))
    state = sharded.full_state_dict(everywhere=True)
    values = {name: hashlib.sha256(value.double().numpy().tobytes()).hexdigest() for name, value in state.items()}
    return {"rows": rows, "values": values, "bytes": sharded.memory(), "traffic": sharded.traffic()}


def main() -> int:
    """Run the command line."""
    ranks, options = int(sys.argv[1]), json.loads(sys.argv[2])
    print(json.dumps(megazero.launch(trained, ranks, options), sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
