"""The table of axes: their order, and the sums that are partial along each. Free of torch."""

from dataclasses import dataclass

# The axes, slowest first, each with the sums that are partial along it: "gradients" (its ranks see different samples)
# and "loss" (of a step). Sums that are partial for some units only are in `UnitAxes` (`zero/placement.py`).
AXES = {"pipeline": {"loss"}, "replica": {"gradients", "loss"}, "shard": {"gradients", "loss"}, "tensor": set[str]()}
JOINED = {"data": ("replica", "shard"), "world": tuple(AXES)}
ENDS = "ends"  # the first and the last rank of a pipeline
FEW_CTAS = 4  # the most multiprocessors of an NCCL communicator whose messages are small or overlapped
P2P = "p2p"  # the lane of messages from one rank to one other
# The lanes in which operations run, in the order of a rank's status slot and outbox.
LANES = (P2P, *JOINED, *AXES, ENDS)


@dataclass(frozen=True)
class Channel:
    """A one-way channel between two ranks of an axis.

    Attributes:
        index: its position among all channels; the same on both sides.
        source, target: ranks on the axis.
        name: the name of its content in the ledger and on the status board: "activations", "gradients".
    """

    index: int
    source: int
    target: int
    name: str
