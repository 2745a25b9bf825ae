"""The bytes that one rank holds, by the categories of the ledger.

    parameters, gradients, optimizer    model states (`states.py`)
    pool          whole buffers of states that are sharded over the data axis: gathered parameters (stage 3) and
                  gradients before their reduce-scatter (stages 2 and 3), one in use and one in transfer (`pool.py`)
    secondary     1/n of all parameters in the format in which they are sent, where n neighbours keep second shards
    matrices      of optimizers of whole matrices (`waves.py`)
    residuals     of error feedback: the quantisation errors of gradients, (N-1)/N of all gradients
    angles        of rotary positions, a table for each kind of them: 2 s d e (cos and sin, d channels of a head)
    inputs        of full recompute: blocks x micro-batches that the schedule keeps x n (the bytes of a block's input),
                  1/t of it with Pa, on the host with Pa+cpu, on disks with Pa+nvme; plus up to two whole inputs where
                  they are gathered or brought back, and n/t in transfer to a disk
    graphs        input, output and their gradients, which pass between replayed blocks: 4 n
    activations   the peak over the schedule's actions: what the live micro-batches keep, plus what the backward of one
                  of them takes (`peak.py`)

A GPU also holds these, which no ledger counts (`planned`):

    communicators   NCCL's (`communicators.py`)
    batch           the micro-batches of a step, sent in one copy and kept to the step's end (`builders/upload.py`):
                    m (17 s b + 8 b) bytes for m micro-batches of b sequences: 8 for a token, 8 for a target, 1 for a
                    target's flag, 8 for a sample's number; with documents 8 m s b more for positions

Categories of offloaded states begin with `host_`, or with `nvme_` on disks: masters and moments in stages 1 to 3,
gradients in stages 2 and 3 (in stage 1 a copy of the rank's shard), parameters in stage 3. Transfers to and from disks
take host memory up to a bound that an option sets for all jobs (`host_pieces` of the ledger).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from megazero.base.quantized import sent_bytes
from megazero.plan import waves
from megazero.plan.activations import kept_by_blocks, kept_input, kept_logits, logits
from megazero.plan.communicators import communicators
from megazero.plan.job import Job
from megazero.plan.layers import products
from megazero.plan.liveness import Moment, liveness
from megazero.plan.machines import Machine
from megazero.plan.optimizers import STATES
from megazero.plan.peak import of_block, of_head
from megazero.plan.pool import pool
from megazero.plan.share import Share, share_of
from megazero.plan.states import states

HOST, DISK = "host_", "nvme_"  # prefixes of the categories of offloaded states
_PREFIX = {"cpu": HOST, "nvme": DISK}
_ALIGNED = 16  # bytes: alignment of each tensor in a packed batch


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


def memory(job: Job, rank: int, *, fused: bool = True, place: tuple[int, int] | None = None) -> RankMemory:
    """Return the memory of rank `rank` of the pipeline axis.

    Args:
        fused: the kernels of norms and activations make no copies of their own.
        place: its numbers on the shard and the tensor axis; None: those of the rank that holds most.
    """
    stages, own = job.layers.of_rank(rank), share_of(job, rank)
    units = own.units
    share = sum(unit.padded * unit.count for unit in units) // job.shard
    held = states(share, job.shard, job.stage, job.bytes)
    place = place or _fullest(own)
    held["optimizer"] += own.kept(place[0]) - job.bytes.kept(STATES["adamw"]) * own.updated
    held["matrices"] = waves.memory(job.at_rest, rank, *place)
    held["pool"] = pool(job, [*stages.values()])
    if job.secondary_ranks is not None:
        bits, item = job.parameter_bits, job.bytes.parameter
        sent = sum(sent_bytes(one.padded // job.shard, bits, item) * one.count for one in units)
        held["secondary"] = job.shard // job.secondary_ranks * sent
    if job.error_feedback:
        held["residuals"] = (job.shard - 1) * share * job.bytes.gradient
    ropes = {job.shape.rope_of(kind) for parts in stages.values() for kind in job.kinds(parts)} - {None}
    held["angles"] = len(ropes) * 2 * job.shape.seq_len * job.shape.head_dim * job.bytes.parameter
    backwards, most = liveness(job, rank)
    held |= _inputs(job, stages, most)
    if job.cuda_graphs:
        held["graphs"] = 4 * job.stream
    held["activations"], cause = _activations(job, rank, stages, backwards, fused)
    return RankMemory(_offloaded(job, share, held), cause)


def _fullest(own: Share) -> tuple[int, int]:
    """Return the numbers on the shard and the tensor axis of a rank that holds most."""
    job = own.job
    if len(job.optimizers.names) == 1:  # every rank holds as much
        return 0, 0
    places, at_rest = product(range(job.shard), range(job.tensor)), job.at_rest
    return max(places, key=lambda place: own.kept(place[0]) + waves.memory(at_rest, own.rank, *place))


def planned(job: Job, rank: int, machine: Machine, counted: RankMemory | None = None) -> RankMemory:
    """Return the memory of rank `rank` of the pipeline axis on a machine, including what no ledger counts.

    On a CPU nothing is added.

    Args:
        counted: the memory that a ledger counts; None: it is computed.
    """
    found, channels = counted or memory(job, rank), machine.nccl_channels
    if not channels:
        return found
    more = {"communicators": sum(one.bytes for one in communicators(job, rank, channels)), "batch": batch(job)}
    return replace(found, held=found.held | {category: size for category, size in more.items() if size})


def batch(job: Job) -> int:
    """Return the bytes of a step's packed micro-batches on one rank."""
    tokens = job.shape.seq_len * job.micro_batch
    sizes = [8 * tokens, 8 * tokens, tokens, 8 * job.micro_batch, 8 * tokens * job.mask_eod]
    return job.micro_batches * sum(-(-size // _ALIGNED) * _ALIGNED for size in sizes)


def _inputs(job: Job, stages: dict[int, range], most: dict[int, int]) -> dict[str, int]:
    if job.recompute != "full":
        return {}
    each = kept_input(job)
    slots = sum(most[stage] * job.blocks(parts) for stage, parts in stages.items())
    split = job.partition and not job.sequence and job.tensor > 1
    # One in use and one in transfer, both of one stage.
    whole = min(2, max(map(job.blocks, stages.values()))) * job.stream if split or job.offload != "none" else 0
    if job.offload == "nvme":
        return {f"{DISK}inputs": slots * each, "inputs": whole + each}
    if job.offload == "cpu":
        return {f"{HOST}inputs": slots * each, "inputs": whole}
    return {"inputs": slots * each + whole}


def _activations(
    job: Job, rank: int, stages: dict[int, range], backwards: list[Moment], fused: bool
) -> tuple[int, str]:
    """Return the peak bytes over all backwards of a step, and its cause."""
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
    """Return the bytes of one message being received and one being sent.

    The last rank of a pipeline without chunks has only one message, because it sends no activations.
    """
    if job.pipeline == 1:
        return 0
    return job.stream * (1 if job.chunks == 1 and rank == job.pipeline - 1 else 2)


class _Walk:
    """The bytes that a micro-batch takes on one stage.

    Attributes:
        kept: activations, between forward and backward.
        noted: inputs and output gradients of matrix products, between input gradients and weight gradients.
    """

    def __init__(self, job: Job, parts: range, fused: bool):
        self._job, self._fused = job, fused
        self._parts, self._head = parts, parts.stop == job.shape.layers + 2
        self.kept = kept_by_blocks(job, parts) + (2 * job.stream + kept_logits(job) if self._head else 0)
        # Each product's input and output gradient. One of the two has the whole sequence on every rank.
        widths = sum(layer.split_width + job.tensor * job.shape.hidden for layer in products(job))
        self._token = job.tokens * job.bytes.parameter  # bytes of one value for each token
        self._noted_by_block = self._token * widths // job.tensor
        self._noted_by_head = self._token * job.shape.hidden + logits(job) if self._head else 0
        self.noted = job.blocks(parts) * self._noted_by_block + self._noted_by_head

    @cached_property
    def peak(self) -> tuple[int, str]:
        """Return the peak in its backward, kept activations included, and its cause."""
        of_head_ = of_head(self._job, self._parts, fused=self._fused) if self._head else ()
        return max([*of_head_, *map(self._peak_of, self._job.lasts(self._parts))])

    def _peak_of(self, part: int) -> tuple[int, str]:
        """Return the peak, and its cause, in the backward of the block that is this part."""
        return max(of_block(self._job, range(self._parts.start, part + 1), fused=self._fused))

    @cached_property
    def peak_with_notes(self) -> tuple[int, str]:
        """Return the peak and its cause where weight gradients are computed later.

        From block to block of a kind, the sum of kept and noted bytes changes by a constant. So the peak is in the last
        or in the first block of a kind, on top of what the head and the blocks after it have noted.
        """
        job = self._job
        down = products(job)[-1]  # its input and its output's gradient are alive
        still_there = self._noted_by_head + self._token * (down.split_width // job.tensor + job.shape.hidden)
        peaks = ((part, *self._peak_of(part)) for part in (*job.lasts(self._parts), *job.firsts(self._parts)))
        later = ((self._job.blocks(range(part + 1, self._parts.stop)), size, cause) for part, size, cause in peaks)
        return max((still_there + blocks * self._noted_by_block + size, cause) for blocks, size, cause in later)


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
        # Rounded parameters in transfer to the device or a disk; a disk's update sends its results this way too.
        rounded = job.offload_optimizer == "cpu" and not job.one_home and item.master != item.parameter
        if rounded or (job.offload_optimizer == "nvme" and not job.parameters_away and job.apart):
            found["host_parameters"] = item.parameter * share
    return {category: size for category, size in found.items() if size}
