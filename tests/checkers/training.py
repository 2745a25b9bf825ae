"""A trainer around one rank of a layout: the steps of a run, without its files, its loader and what observes it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megazero.builders.assemble import StageInputs
from megazero.train.spikes import Spikes
from megazero.train.trainer import Trainer
from tests.layouts import Rank

STEPS = 2  # the second one sees what the first has left


def feed(batch: StageInputs, step: int) -> StageInputs:
    """Return what the stages need to know of a micro-batch; on a GPU it is there since the loader has sent it."""
    return batch


def trainer_of(one: Rank, now: Callable[[int, str], object]) -> Trainer:
    """Return a trainer whose micro-batches are those of the layout's tests.

    Args:
        now: told the step (from 1) and what is being done.
    """
    batches = [[one.feed(step, m) for m in range(one.job.micro_batches)] for step in range(STEPS)]
    nothing: Any = SimpleNamespace()
    return Trainer(
        one.engine,
        one.pipeline,
        lambda batch, step: feed(batch, step),
        _as(step=batches.__getitem__),
        (),
        nothing,
        _as(steps=-1, logs=lambda step: False, learning_rate=_as(at=lambda step: 1e-3)),
        _as(settle=lambda: None, failed=False, seconds=0.0, due=lambda done: False, saved=None),
        _as(votes=lambda **_: [2], counted=lambda votes: None),
        lambda: None,
        now,
        nothing,
        Spikes(10.0, skips=True, say=str),
    )


def _as(**attributes: Any) -> Any:
    return SimpleNamespace(**attributes)
