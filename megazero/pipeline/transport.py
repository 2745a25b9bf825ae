"""Move tensors between stages: activations to the next stage, their gradients to the previous one.

Every message has the shape of one micro-batch's residual stream, which both sides know. Between two stages of one rank
tensors are passed without a copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megazero.comm.axes import Channel
from megazero.comm.grid import Axis
from megazero.comm.transport.p2p import PointToPoint, Receipt
from megazero.schedules.actions import Action, B, F, Kind

# For each transfer: the kind of pass that the message is for, and the offset of the other side's stage.
_SENDS = {Kind.SEND_FORWARD: (F, 1), Kind.SEND_BACKWARD: (B, -1)}
_RECEIVES = {Kind.RECEIVE_FORWARD: (F, -1), Kind.RECEIVE_BACKWARD: (B, 1)}
_NAMES = {F: "activations", B: "gradients"}


class Transport:
    """Passes tensors between this rank's stages and others.

    Args:
        pipeline: the pipeline axis.
        rank_of: the rank of each stage.
        dtype, device: of every message.
    """

    def __init__(self, pipeline: Axis, rank_of: Sequence[int], dtype: torch.dtype, device: torch.device):
        self._dtype, self._device, self._pipeline = dtype, device, pipeline
        self._channels: dict[tuple[Kind, int], Channel] = {}  # by (FORWARD or BACKWARD, receiving stage)
        for stage in range(1, len(rank_of)):
            low, high = rank_of[stage - 1], rank_of[stage]
            if low != high:
                self._channels[F, stage] = Channel(2 * stage, low, high, _NAMES[F])
                self._channels[B, stage - 1] = Channel(2 * stage + 1, high, low, _NAMES[B])
        self._messages: PointToPoint | None = None
        self._here: dict[tuple[Kind, int, int], Tensor] = {}
        self._coming: dict[tuple[Kind, int, int], Receipt] = {}

    def open(self) -> None:
        """Open the channels. Collective over the world, before the first send or receive.

        The constructor does not open them, so that building a model needs no communication.
        """
        if self._channels and self._messages is None:
            self._messages = PointToPoint(self._pipeline, list(self._channels.values()), self._device)

    def put(self, kind: Kind, stage: int, micro_batch: int, x: Tensor) -> None:
        """Keep `stage`'s input (FORWARD) or its output's gradient (BACKWARD), for `take` here or `send` to its rank."""
        self._here[kind, stage, micro_batch] = x

    def take(self, kind: Kind, stage: int, micro_batch: int) -> Tensor:
        """Wait for the tensor that a stage of this rank needs; return it. Raises CollectiveError if none arrives."""
        key = kind, stage, micro_batch
        return self._coming.pop(key).wait() if key in self._coming else self._here.pop(key)

    def send(self, action: Action) -> None:
        """Send the tensor that was `put` for another rank's stage; `action` is its send."""
        kind, towards = _SENDS[action.kind]
        stage = action.stage + towards
        assert self._messages is not None, "open comes first"
        self._messages.send(self._channels[kind, stage], self._here.pop((kind, stage, action.micro_batch)).contiguous())

    def post(self, action: Action, shape: Sequence[int]) -> None:
        """Start to receive a tensor from another rank's stage; `action` is the receive, and `take` waits for it."""
        kind, towards = _RECEIVES[action.kind]
        what = f"{_NAMES[kind]} of micro-batch {action.micro_batch} from stage {action.stage + towards}"
        into = torch.empty(tuple(shape), dtype=self._dtype, device=self._device)
        assert self._messages is not None, "open comes first"
        receipt = self._messages.post(self._channels[kind, action.stage], into, what)
        self._coming[kind, action.stage, action.micro_batch] = receipt

    def finish(self) -> None:
        """Finish a step: check that all tensors were taken, and wait for the sends."""
        assert not self._here and not self._coming, f"not taken: {[*self._here, *self._coming]}"
        if self._messages is not None:
            self._messages.finish()
