"""A pipeline in which stage 1 computes an output or a gradient that is not finite, in step 2.

python -m tests.pipeline.poisoned output|gradient CONFIG ...: what follows are overrides.
"""

import sys

import torch
from torch import Tensor

import megazero.run.build
from megazero.base.errors import UserError
from megazero.builders.assemble import Built, StageInputs
from megazero.config.file import load
from megazero.tools.training.launch import launch

honest = megazero.run.build.build


def main() -> int:
    kind, config = sys.argv[1], load(sys.argv[2], sys.argv[3:])

    def poisoned(*arguments, **options) -> Built:
        built = honest(*arguments, **options)
        stage = built.pipeline.stages.get(1)
        if stage is not None:
            run = stage.run

            def compute(x: Tensor | None, feed: StageInputs) -> Tensor:
                y = run(x, feed)
                if feed.now.step + 1 < 2:
                    return y
                if kind == "output":
                    return y * torch.inf
                y.register_hook(lambda gradient: gradient * torch.inf)
                return y

            stage.run = compute
        return built

    megazero.run.build.build = poisoned
    try:
        return launch(config, "poisoned", None)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
