"""Say how large a job's checkpoint is, how long a save takes, and how long before its end a job needs its signal."""

import math
from dataclasses import dataclass

from megazero.plan.job import Job
from megazero.plan.layers import parameters
from megazero.plan.machines import MACHINES, Machine

SHARED_RATE = 1e9  # bytes/s from one node into a file system that all nodes see: supposed where no disk was measured
_STEPS, _SAVES = 2, 1.5  # that a stopped run may still take, as run.time_limit reckons
_MARGIN_SECONDS, LEAST_LEAD = 30, 120


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a job.

    Attributes:
        bytes: weights in full precision and both moments.
        rate: bytes/s from one node.
        measured: the rate is that of a disk in the machine's file.
        save_s: seconds in which all ranks copy their parts to the host and write them.
        lead_s: seconds before its end in which a job is to get its signal: two steps, 1.5 saves and a margin.
    """

    bytes: int
    rate: float
    measured: bool
    save_s: float
    lead_s: int


def checkpoint_of(job: Job, machine: Machine, step_s: float) -> Checkpoint:
    """Return the checkpoint of a job, whose state all ranks write, each an equal part."""
    size = 3 * job.bytes.master * parameters(job.shape)
    in_node = min(job.ranks, machine.devices_per_node)
    measured = None if machine.name in MACHINES else machine.disk
    rate = SHARED_RATE if measured is None else measured.write * in_node
    part = size / job.ranks
    save_s = part / machine.host_link_bandwidth + part * in_node / rate
    seconds = _STEPS * step_s + _SAVES * save_s + _MARGIN_SECONDS
    return Checkpoint(size, rate, measured is not None, save_s, max(LEAST_LEAD, 10 * math.ceil(seconds / 10)))
