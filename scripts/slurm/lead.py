"""Print the seconds before its end in which a job has to be told to save.

    python -m scripts.slurm.lead HARDWARE RANKS CONFIG [section.key=value ...]

HARDWARE is what `megazero plan --hardware` takes, and the time of a save is plan's. Where HARDWARE is "" or cannot be
planned for, the answer is LEAST_LEAD. It imports no torch.
"""

import sys
from collections.abc import Sequence

from megazero.base.errors import UserError
from megazero.config.file import load
from megazero.tools.planning.job import LEAST_LEAD, plan
from megazero.tools.planning.machine_file import machine_of


def main(arguments: Sequence[str]) -> int:
    """Print the seconds; return the exit code, which is 0: a job can train without a plan."""
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
