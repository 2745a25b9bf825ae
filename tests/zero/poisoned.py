"""A training run in which one rank's loss is not finite from a step on.

python -m tests.zero.poisoned RANK STEP CONFIG ...: STEP counts from 1; what follows are overrides. Two local ranks.
"""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import megazero.build
from megazero.config_file import load
from megazero.data.loader import MicroBatch
from megazero.errors import UserError
from megazero.run import launch

honest = megazero.build.model_losses


def main() -> int:
    bad_rank, first, config = int(sys.argv[1]), int(sys.argv[2]), load(sys.argv[3], sys.argv[4:])

    def poisoned(*arguments) -> Callable[[MicroBatch, int, bool], Tensor]:
        losses = honest(*arguments)

        def compute(batch: MicroBatch, step: int, training: bool) -> Tensor:
            bad = training and dist.get_rank() == bad_rank and step + 1 >= first
            return losses(batch, step, training) * (torch.inf if bad else 1.0)

        return compute

    megazero.build.model_losses = poisoned
    try:
        return launch(config, "poisoned", 2)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
