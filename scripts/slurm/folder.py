"""Print the run folder of a config: python -m scripts.slurm.folder CONFIG [section.key=value ...].

A batch script calls this before it starts any rank, so that a mistake in the config gives one line and exit code 2.
Does not import torch.
"""

import sys
from collections.abc import Sequence

from megazero.base.errors import UserError
from megazero.config.file import load, name_of
from megazero.config.flat import run_dir


def main(arguments: Sequence[str]) -> int:
    """Print the folder; return the exit code."""
    name, *overrides = arguments
    try:
        config = load(name, overrides)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(run_dir(config, name_of(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
