"""Divide the data axis into neighbours and those that have this rank's place among theirs."""

from dataclasses import replace

from megazero.comm.grid import Axis, Grid


def near_and_far(grid: Grid) -> tuple[Axis, Axis]:
    """Return the axis of this rank's neighbours, and the one of the ranks with its place among other neighbours.

    Neighbours talk through memory only where all data ranks do: else a rank that waits for a socket of the one axis
    could be waited for by one that waits for memory of the other.
    """
    near, memory = grid["shard"], grid.comm.shared_memory
    if memory is not None and not memory.reached.issuperset(grid["data"].ranks):
        near = replace(near, comm=replace(near.comm, shared_memory=None))
    return near, grid["replica"]
