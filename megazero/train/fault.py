"""Find where in a step that was not finite the first number that is not finite came up, on one rank."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megazero.data.batch import MicroBatch
from megazero.pipeline.executor import Pipeline
from megazero.pipeline.stage import StageInputs
from megazero.schedules.actions import Kind
from megazero.zero.engine import Engine

# A place in the flow of a step's data (first forwards, then backwards, from the loss on), and what is wrong there.
Fault = tuple[int, str]
AFTER_SUMS = 1 << 30  # the place of faults in sums over ranks: after all that a rank computes


def own_fault(
    engine: Engine,
    pipeline: Pipeline,
    loss_scale: Tensor,
    batches: Sequence[MicroBatch],
    feed: Callable[[MicroBatch], StageInputs],
) -> Fault | None:
    """Compute this rank's part of a step once more, without the others; return its first fault, None if all is finite.

    Args:
        loss_scale: of the step.
        batches: of the step.
        feed: micro-batch -> the inputs of the passes.
    """
    last, seen = pipeline.num_stages - 1, list[Fault]()

    def look(kind: Kind, stage: int, micro_batch: int, made: Tensor) -> None:
        if torch.isfinite(made).all():
            return
        what, place = f"gradient of the input of stage {stage}", 2 * last + 1 - stage
        if kind is Kind.FORWARD:
            what, place = "loss" if stage == last else f"output of stage {stage}", stage
        seen.append((place, f"{what} of micro-batch {micro_batch}"))

    found = engine.examine(lambda: pipeline.train(batches, feed, look=look), loss_scale)
    stages = list(pipeline.stages)
    parameters = [(2 * last + 1 - stages[number], what) for number, what in found]
    return min([*parameters, *seen], key=lambda fault: fault[0], default=None)
