"""Tell at which step each stage of a run ends."""

from collections.abc import Mapping, Sequence
from typing import Any


def stage_ends(stages: Sequence[Mapping[str, Any]], tokens_per_step: int) -> list[int]:
    """Return the last step of each stage, from 1: the first one with which its tokens are trained on, if it has those.

    Args:
        stages: with `until_step` or `until_tokens`, the other null.
        tokens_per_step: of the global batch.
    """
    return [
        stage["until_step"] if stage["until_step"] is not None else -(-(stage["until_tokens"] or 0) // tokens_per_step)
        for stage in stages
    ]
