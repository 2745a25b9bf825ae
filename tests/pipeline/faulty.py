"""A pipeline in which one rank is ended or stopped in the middle of a schedule.

python -m tests.pipeline.faulty KILL|STOP RANK STEP PHASE CONFIG ...: what follows are overrides. Prints when it does.
"""

import os
import signal
import sys
import time

from megazero.comm.status_board import StatusSlot
from megazero.config.file import load
from megazero.tools.training.launch import launch

honest = StatusSlot.now


def main() -> int:
    what, rank, bad_step, bad_phase = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    config = load(sys.argv[5], sys.argv[6:])

    def now(status_slot: StatusSlot, step: int, phase: str) -> None:
        honest(status_slot, step, phase)
        if (step, phase) == (bad_step, bad_phase) and status_slot.board.page(rank).pid == os.getpid():
            print(f"now {time.monotonic()}", flush=True)
            os.kill(os.getpid(), {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}[what])

    StatusSlot.now = now
    return launch(config, "faulty", None)


if __name__ == "__main__":
    sys.exit(main())
