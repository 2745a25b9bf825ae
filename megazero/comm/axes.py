"""The table of axes: their order, and what is partial along each. Free of torch."""

from dataclasses import dataclass

# The axes, slowest first; and the sums of which each rank along an axis has a summand: "gradients" (its ranks see other
# samples) and "loss" (of a step). Sums that are partial for some units only are in `UnitAxes` (`zero/placement.py`).
AXES = {
    "pipeline": {"loss"},
    "replica": {"gradients", "loss"},
    "shard": {"gradients", "loss"},
    "tensor": set[str](),
}
JOINED = {"data": ("replica", "shard"), "world": tuple(AXES)}
ENDS = "ends"  # the first and the last rank of a pipeline
FEW_CTAS = 4  # multiprocessors of a communicator of NCCL whose messages are small or hidden
P2P = "p2p"  # what one rank waits for from one other
# Where operations go on; the place of each in a rank's status slot and outbox.
LANES = (P2P, *JOINED, *AXES, ENDS)


@dataclass(frozen=True)
class Channel:
    """A one-way channel between two ranks of an axis.

    Attributes:
        index: its position among all channels; the same on both sides.
        source, target: ranks on the axis.
        name: of its content, for the ledger and the board: "activations", "gradients".
    """

    index: int
    source: int
    target: int
    name: str
