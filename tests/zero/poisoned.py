"""A training run in which one rank's loss, or its copy of a reduced gradient, is not finite from a step on.

python -m tests.zero.poisoned WHAT RANK STEP CONFIG ...: WHAT is `loss` or a parameter; STEP counts from 1; what follows
are overrides. Two local ranks.
"""

import sys
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

import megazero.run.build
from megazero.base.errors import UserError
from megazero.builders.assemble import Built, StageInputs
from megazero.config.file import load
from megazero.tools.training.launch import launch
from megazero.zero.engine import Engine, StepResult

honest = megazero.run.build.build


def poison_reduced(engine: Engine, parameter: str, first: int, at: int = -1) -> None:
    """From step `first` on, put NaN into a parameter's reduced gradient, after all sums over ranks; at its end."""
    finish, steps = engine.finish_step, count(1)
    unit = next(unit for unit in engine.units if parameter in unit.gradients.views)

    def finish_poisoned(*arguments, **options) -> StepResult:
        if next(steps) >= first:
            interval = next(each for each in unit.layout.intervals if each.name == parameter)
            place = interval.stop - 1 if at < 0 else interval.start + at
            unit.gradients.reduced[place - unit.shard.start] = torch.nan
        return finish(*arguments, **options)

    engine.finish_step = finish_poisoned


def main() -> int:
    what, bad_rank, first, config = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), load(sys.argv[4], sys.argv[5:])

    def poisoned(*arguments, **options) -> Built:
        built = honest(*arguments, **options)
        if dist.get_rank() == bad_rank and what != "loss":
            poison_reduced(built.engine, what, first)
            return built
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
