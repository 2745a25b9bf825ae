"""Print how many seconds before its end a job must get the signal to save.

    python -m scripts.slurm.lead HARDWARE RANKS CONFIG [section.key=value ...]

HARDWARE is a value of `megazero plan --hardware`; the time of a save is that of the plan. If HARDWARE is "" or has no
plan, the answer is LEAST_LEAD. Does not import torch.
"""

import sys
from collections.abc import Sequence

from megazero.base.errors import UserError
from megazero.config.file import load
from megazero.tools.planning.job import LEAST_LEAD, plan
from megazero.tools.planning.machine_file import machine_of


def main(arguments: Sequence[str]) -> int:
    """Print the seconds; return exit code 0 always, because a job can train without a plan."""
    hardware, ranks, name, *overrides = arguments
    lead = LEAST_LEAD
    if hardware:
        try:
            lead = plan(load(name, overrides), int(ranks), machine_of(hardware)).checkpoint.lead_s
        except UserError as error:
            print(f"warning: a save is supposed to take no longer than {LEAST_LEAD} s: {error}", file=sys.stderr)
    print(lead)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
