"""A training run in which one rank's loss is not finite from a step on.

python -m tests.zero.poisoned RANK STEP CONFIG ...: STEP counts from 1; what follows are overrides. Two local ranks.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

import megazero.run.build
from megazero.base.errors import UserError
from megazero.build.assemble import Built, StageInputs
from megazero.config.file import load
from megazero.run.session import launch

honest = megazero.run.build.build


def main() -> int:
    bad_rank, first, config = int(sys.argv[1]), int(sys.argv[2]), load(sys.argv[3], sys.argv[4:])

    def poisoned(*arguments, **options) -> Built:
        built = honest(*arguments, **options)
        stage = built.pipeline.stages.get(built.pipeline.num_stages - 1)
        if stage is not None and dist.get_rank() == bad_rank:
            run = stage.run

            def compute(x: Tensor | None, feed: StageInputs) -> Tensor:
                bad = feed.now.training and feed.now.step + 1 >= first
                return run(x, feed) * (torch.inf if bad else 1.0)

            stage.run = compute
        return built

    megazero.run.build.build = poisoned
    try:
        return launch(config, "poisoned", 2)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
