"""A pipeline in which one rank is ended or stopped in the middle of a schedule.

python -m tests.pipeline.faulty KILL|STOP RANK STEP PHASE CONFIG ...: what follows are overrides. Prints when it does.
"""

import os
import signal
import sys
import time

from megazero.comm.status_board import Seat
from megazero.config.file import load
from megazero.run.session import launch

honest = Seat.now


def main() -> int:
    what, rank, bad_step, bad_phase = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    config = load(sys.argv[5], sys.argv[6:])

    def now(seat: Seat, step: int, phase: str) -> None:
        honest(seat, step, phase)
        if (step, phase, seat._at) == (bad_step, bad_phase, rank * 4096):
            print(f"now {time.monotonic()}", flush=True)
            os.kill(os.getpid(), {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}[what])

    Seat.now = now
    return launch(config, "faulty", None)


if __name__ == "__main__":
    sys.exit(main())
