"""A run is over, with its checkpoint, before its time limit, also where the host waits in the update of a step.

With `zero.offload.optimizer` most of a step is spent there: `finish_step` waits for backward and computes the update.
"""

from pathlib import Path

import pytest
import torch

from megazero.comm.grid import single
from megazero.launcher.signals import Signals
from megazero.train.stopping import REASONS, Reason, Stopping

SAVING = 1.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("passes", [90.0, 50.0, 10.0])
@pytest.mark.parametrize("limit", [1003.0, 1013.0, 1043.0, 1083.0])
def test_the_last_step_and_its_save_end_in_time(tmp_path: Path, limit: float, passes: float) -> None:
    """As in `Trainer.train_step`: passes, the votes of the step before are counted, votes, update."""
    clock = Clock()
    stopping = Stopping(single()["world"], torch.device("cpu"), Signals(), tmp_path / "STOP", limit, clock)
    reason: Reason | None = stopping.check()
    cast: list[int] | None = None
    while reason is None:
        clock.now += passes
        if cast is not None:
            reason = stopping.counted([float(place in cast) for place in range(len(REASONS))])
        cast = stopping.votes(failed=False, saving=SAVING)
        clock.now += 100.0 - passes
    assert limit - 301 < clock.now + SAVING <= limit
