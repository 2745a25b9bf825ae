"""The bytes that one rank holds, by the categories of the ledger.

    parameters, gradients, optimizer    model states (`states.py`)
    pool          whole buffers of what is kept sharded over the data axis: gathered parameters (stage 3) and gradients
                  on their way to a shard (stages 2 and 3), one in use and one coming or going (`pool.py`)
    secondary     1/n of all parameters, as they are sent, where n neighbours keep a second shard
    residuals     of error feedback: what quantised gradients have lost, (N-1)/N of all gradients
    angles        of rotary positions, one table for all blocks: 2 s d e (cos and sin, d channels of a head)
    inputs        of full recompute: blocks x micro-batches that the schedule keeps x n, 1/t of it with Pa, on the host
                  with Pa+cpu, on disks with Pa+nvme; where they have to be put together again two whole ones more; on
                  their way to a disk one more n/t
    graphs        input, output and their gradients, which pass between replayed blocks: 4 n
    activations   walked through with the schedule's list of actions: what the micro-batches under way keep, and what
                  the backward of one of them takes on top (`peak.py`)

Beside these a GPU holds, and no ledger counts (`planned`):

    communicators   NCCL's (`communicators.py`)
    batch           the micro-batches of a step, sent by one copy, kept to its end (`builders/upload.py`); in bytes, of
                    m micro-batches of b sequences: m (17 s b + 8 b), tokens and targets 8 each, a flag for each
                    target, numbers of samples; with documents 8 m s b more for positions

What is offloaded has `host_` before its category, or `nvme_` on disks. With stage 1 to 3: masters and moments; in
stages 2 and 3 gradients too; parameters of stage 3. What is on its way to disks and back takes host memory up to a
bound that is an option (`host_pieces` of the ledger), whatever the job.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from megazero.base.quantized import sent_bytes
from megazero.plan.activations import kept_by_block, logits
from megazero.plan.communicators import communicators
from megazero.plan.job import Job
from megazero.plan.liveness import Moment, liveness
from megazero.plan.machines import Machine
from megazero.plan.peak import moments
from megazero.plan.pool import pool
from megazero.plan.share import share_of
from megazero.plan.states import states

HOST, DISK = "host_", "nvme_"  # begin the categories of what is offloaded
_PREFIX = {"cpu": HOST, "nvme": DISK}
_ALIGNED = 16  # bytes, of a tensor among those that are packed


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank of the pipeline axis: bytes by category, and the cause of the peak of activations."""

    held: dict[str, int]
    cause: str

    @property
    def peak(self) -> int:
        """Return the bytes on the device."""
        return sum(self.held.values()) - self.host - self.disk

    @property
    def host(self) -> int:
        """Return the bytes in the host's memory."""
        return sum(size for category, size in self.held.items() if category.startswith(HOST))

    @property
    def disk(self) -> int:
        """Return the bytes on disks."""
        return sum(size for category, size in self.held.items() if category.startswith(DISK))


def memory(job: Job, rank: int, *, fused: bool = True) -> RankMemory:
    """Return the memory of rank `rank` of the pipeline axis.

    Args:
        fused: the kernels of norms and activations make no copies of their own.
    """
    stages = job.layers.of_rank(rank)
    units = share_of(job, rank).units
    share = sum(unit.padded * unit.count for unit in units) // job.shard
    held = states(share, job.shard, job.stage, job.bytes)
    held["pool"] = pool(job, [*stages.values()])
    if job.secondary_ranks is not None:
        sent = (
            sent_bytes(one.padded // job.shard, job.parameter_bits, job.bytes.parameter) * one.count for one in units
        )
        held["secondary"] = job.shard // job.secondary_ranks * sum(sent)
    if job.error_feedback:
        held["residuals"] = (job.shard - 1) * share * job.bytes.gradient
    if not job.shape.learned_positions:
        held["angles"] = 2 * job.shape.seq_len * job.shape.head_dim * job.bytes.parameter
    backwards, most = liveness(job, rank)
    held |= _inputs(job, stages, most)
    if job.cuda_graphs:
        held["graphs"] = 4 * job.stream
    held["activations"], cause = _activations(job, rank, stages, backwards, fused)
    return RankMemory(_offloaded(job, share, held), cause)


def planned(job: Job, rank: int, machine: Machine, counted: RankMemory | None = None) -> RankMemory:
    """Return the memory of rank `rank` of the pipeline axis on a machine, with what no ledger counts.

    Ranks on a CPU have nothing of that.

    Args:
        counted: what a ledger counts, if it is known.
    """
    found, channels = counted or memory(job, rank), machine.nccl_channels
    if not channels:
        return found
    more = {"communicators": sum(one.bytes for one in communicators(job, rank, channels)), "batch": batch(job)}
    return replace(found, held=found.held | {category: size for category, size in more.items() if size})


def batch(job: Job) -> int:
    """Return the bytes of the micro-batches of a step on one rank, as they are packed."""
    tokens = job.shape.seq_len * job.micro_batch
    sizes = [8 * tokens, 8 * tokens, tokens, 8 * job.micro_batch, 8 * tokens * job.mask_eod]
    return job.micro_batches * sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


def _inputs(job: Job, stages: dict[int, range], most: dict[int, int]) -> dict[str, int]:
    if job.recompute != "full":
        return {}
    each = kept_by_block(job, "full")
    slots = sum(most[stage] * job.blocks(parts) for stage, parts in stages.items())
    split = job.partition and not job.sequence and job.tensor > 1
    # One in use and one on its way back, both of one stage.
    whole = min(2, max(map(job.blocks, stages.values()))) * job.stream if split or job.offload != "none" else 0
    if job.offload == "nvme":
        return {f"{DISK}inputs": slots * each, "inputs": whole + each}
    if job.offload == "cpu":
        return {f"{HOST}inputs": slots * each, "inputs": whole}
    return {"inputs": slots * each + whole}


def _activations(
    job: Job, rank: int, stages: dict[int, range], backwards: list[Moment], fused: bool
) -> tuple[int, str]:
    """Return the most bytes over the backwards of a step, and their cause."""
    walks = {stage: _Walk(job, parts, fused) for stage, parts in stages.items()}
    most = (0, "")
    for moment in backwards:
        walk = walks[moment.stage]
        size, cause = max(walk.peak, walk.peak_with_notes) if moment.apart else walk.peak
        size += sum(count * walks[stage].kept for stage, count in moment.kept) - walk.kept
        size += sum(count * walks[stage].noted for stage, count in moment.noted)
        most = max(most, (size, cause))
    return most[0] + _messages(job, rank), most[1]


def _messages(job: Job, rank: int) -> int:
    """Return the bytes of one message awaited and one on its way.

    The last rank of a pipeline without chunks has only one: it passes no activations on.
    """
    if job.pipeline == 1:
        return 0
    ends = job.chunks == 1 and rank == job.pipeline - 1
    return job.stream * (1 if ends else 2)


class _Walk:
    """The bytes that a micro-batch takes on one stage.

    Attributes:
        kept: between forward and backward.
        noted: of the matrix products' inputs and gradients, between backward of inputs and of weights.
    """

    def __init__(self, job: Job, parts: range, fused: bool):
        self._job, self._fused = job, fused
        self._blocks, self._head = job.blocks(parts), parts.stop == job.shape.layers + 2
        shape = job.shape
        each = kept_by_block(job, job.recompute) if job.recompute != "full" else 0
        self.kept = self._blocks * each + (2 * job.stream + logits(job) if self._head else 0)
        # Of each product its input and its output's gradient: one of them is of the whole sequence, on every rank.
        products = [layer for layer in job.block if layer.product is not None]
        widths = sum(layer.split_width + job.tensor * shape.hidden for layer in products)
        self._token = job.tokens * job.bytes.parameter  # of a value for each token
        self._noted_by_block = self._token * widths // job.tensor
        self._noted_by_head = self._token * shape.hidden + logits(job) if self._head else 0
        self.noted = self._blocks * self._noted_by_block + self._noted_by_head

    @cached_property
    def peak(self) -> tuple[int, str]:
        """Return the peak in its backward, kept activations included, and its cause."""
        return max(moments(self._job, self._blocks, head=self._head, fused=self._fused))

    @cached_property
    def peak_with_notes(self) -> tuple[int, str]:
        """Return the peak and its cause where the backward of weights comes later.

        It is in the block that comes first, on top of what the head leaves for it, or in the one that comes last, on
        top of what all others do.
        """
        job = self._job
        down = job.block[-1]  # its input and its output's gradient
        still_there = self._token * (down.split_width // job.tensor + job.shape.hidden)
        first, last = (max(moments(job, count, head=False, fused=self._fused)) for count in (self._blocks, 1))
        others = self.noted - self._noted_by_block
        return max((self._noted_by_head + first[0] + still_there, first[1]), (others + last[0] + still_there, last[1]))


def _offloaded(job: Job, share: int, held: dict[str, int]) -> dict[str, int]:
    found, item = dict(held), job.bytes
    if item.master == item.parameter and not job.one_home:  # else parameters are their own masters
        found["optimizer"] += item.master * share
    if job.parameters_away:
        found[f"{_PREFIX[job.offload_parameters]}parameters"] = found.pop("parameters")
    if job.optimizer_away:
        found[f"{_PREFIX[job.offload_optimizer]}optimizer"] = found.pop("optimizer")
        if job.gradients_home != "none":
            found[f"{_PREFIX[job.gradients_home]}gradients"] = item.gradient * share
        if job.shards_gradients:
            del found["gradients"]
        # Rounded, on their way to the device or a disk; what a disk's update writes for the device goes that way too.
        rounded = job.offload_optimizer == "cpu" and not job.one_home and item.master != item.parameter
        if rounded or (job.offload_optimizer == "nvme" and not job.parameters_away and job.apart):
            found["host_parameters"] = item.parameter * share
    return {category: size for category, size in found.items() if size}
