"""The bytes that one rank sends in a step, in closed form, by axis and purpose, as the ledger of a run counts them.

Elements by the ring formula (`comm/ledger.py`); N, t, p ranks of the shard, tensor and pipeline axis, m
micro-batches, P the padded elements of a rank's units, n = s b h elements of a micro-batch's residual stream, n' = n/t
with sequence parallelism and n without. In units of bytes x (N - 1) / N of the data axis, or (t - 1) / t of the
tensor axis:

    gradients       stage 0: 2 P   1: P   2, 3: m P              Rajbhandari et al. 2019 (arXiv 1910.02054), section 7:
    parameters      stages 1, 2: P   3: 2 m P, less the ends     2 P, 2 P, 3 P in all with one micro-batch

    block           forward 4 n, backward 4 n                    8 b s h: Narayanan et al. 2021 (arXiv 2104.04473), 3.2
                    full recompute: 2 n more; the last sum of a replay is left out: the ZeRO paper counts 12 (section 8)
                    sequence parallelism: 2 n more, inputs of column products again (arXiv 2205.05198, section 4.2.2),
                    and 3 n in a replay
    inputs          Pa: n for each block, 1/12 of the paper's sums, 1/10 of these
    embedding       forward 2 n; sequence: n and n
    head            backward 2 n; sequence: n forward, n again, n backward
    loss            3 numbers for each token
    tail            sequence: 2 of each element of a shard that is whole on every tensor rank

    replica         2 P / N gradients, once a step, in units of bytes x (R - 1) / R of R shard groups

Gradients along these axes and at the ends count in the bytes in which they are summed (`zero.reduce_dtype`); what is
quantised on its way between shard ranks (`zero.quantize`) in those of codes and scales (`base/quantized.py`).

    pipeline        n' for each micro-batch and neighbour stage on another rank
    ends            the tied weight's reduced gradient, 2 / 2 = 1 of each element
    norm, loss      fp64 scalars: a sum of squares for each unit; over all ranks the loss, the count of its tokens, and
                    the votes on ending the run
    host, disk      what is offloaded, to and fro

In stage 3 a forward gathers every unit of the stage; a backward those of the blocks, because the embedding needs none
and the head's are still there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megazero.base.quantized import sent_bytes
from megazero.plan.job import Job
from megazero.plan.nodes import AWAY, axis_size
from megazero.plan.states import UnitSize

_AXIS = {"cpu": "host", "nvme": "disk"}  # the ways to what is offloaded, as the ledger names them
WIDE = 8  # bytes of a scalar that ranks sum
TOTALS = 11  # scalars of a step that all ranks sum: loss, its tokens, one that is not finite, votes (`zero/engine.py`)


@dataclass(frozen=True)
class Share:
    """The share of the model that a pipeline rank has.

    Attributes:
        blocks: their number.
        embedding, head: whether it has that end.
        sends, returns: neighbour stages on other ranks that get activations, and gradients.
    """

    blocks: int
    embedding: bool
    head: bool
    sends: int
    returns: int


@dataclass(frozen=True)
class Flow:
    """All operations of one purpose on one axis in a step.

    Attributes:
        axis, purpose: as the ledger names them.
        ops: their number.
        bytes: bytes that the rank sends, over all of them.
    """

    axis: str
    purpose: str
    ops: int
    bytes: int


@dataclass(frozen=True)
class _Unit:
    """A unit of a rank: padded elements, where its tail begins, number of such units.

    From its tail on, the buffer is whole on every tensor rank.

    Attributes:
        forward, backward: how often stage 3 gathers it in those of a micro-batch.
    """

    name: str
    padded: int
    tail: int
    count: int
    forward: int = 1
    backward: int = 0


def share_of(job: Job, rank: int) -> Share:
    """Return the share of one rank of the pipeline axis."""
    layers, last = job.layers, job.shape.layers + 1
    stages = layers.of_rank(rank)
    own = [i for parts in stages.values() for i in parts]
    remote = [stage for stage in stages if stage + 1 < len(layers.parts) and layers.rank_of[stage + 1] != rank]
    back = [stage for stage in stages if stage > 0 and layers.rank_of[stage - 1] != rank]
    return Share(sum(0 < i < last for i in own), 0 in own, last in own, len(remote), len(back))


def traffic(job: Job, rank: int = 0, shard_rank: int | None = None) -> dict[str, dict[str, int]]:
    """Return the bytes that a rank sends in a step: `[axis][purpose]`, with `host` for copies to and from its memory.

    Args:
        rank: its number on the pipeline axis.
        shard_rank: its number on the shard axis; None: the last, whose shards have most of the tails: none sends more.
    """
    found: dict[str, dict[str, int]] = {}
    for flow in flows(job, share_of(job, rank), shard_rank):
        if flow.bytes:
            purposes = found.setdefault(flow.axis, {})
            purposes[flow.purpose] = purposes.get(flow.purpose, 0) + flow.bytes
    return found


def sent(found: dict[str, dict[str, int]]) -> int:
    """Return the bytes sent to other ranks, over all axes and purposes."""
    return sum(size for axis, purposes in found.items() if axis not in AWAY for size in purposes.values())


def fullest(job: Job) -> int:
    """Return the pipeline rank that sends most."""
    return max(range(job.pipeline), key=lambda rank: sent(traffic(job, rank)))


def flows(job: Job, share: Share, shard_rank: int | None = None) -> Iterator[Flow]:
    """Yield everything that a rank with this share of the model sends in a step, and receives from its host."""
    own = _units(job, share)
    yield from _data(job, own)
    yield from _tensor(job, share)
    yield from _tails(job, own, job.shard - 1 if shard_rank is None else shard_rank)
    yield from _pipeline(job, share)
    yield from _scalars(job, share, own)
    yield from _host(job, share, own)


def gathers(job: Job, share: Share) -> tuple[int, int]:
    """Return the elements that stage 3 gathers for the forward, and for the backward, of one micro-batch."""
    own = _units(job, share)
    forward, backward = (
        sum(unit.padded * unit.count * times(unit) for unit in own)
        for times in (lambda unit: unit.forward, lambda unit: unit.backward)
    )
    return forward, backward


def _gathers_of(job: Job, own: list[_Unit]) -> Iterator[Flow]:
    """Yield the gathers of stage 3 over shard ranks, and those among neighbours with second shards."""
    n, m, near = job.shard, job.micro_batches, job.secondary_ranks
    if not job.shards_parameters:
        return
    sizes = [
        (unit.count * sent_bytes(unit.padded // n, job.parameter_bits, job.bytes.parameter), _times(unit))
        for unit in own
    ]
    ops = m * sum(unit.count * _times(unit) for unit in own)
    if near is None:
        yield Flow(job.shard_axis, "parameters", ops, m * (n - 1) * sum(size * times for size, times in sizes))
        return
    first = sum(unit.count for unit in own)
    yield Flow("data", "parameters", first, (n - 1) * sum(size for size, _ in sizes))
    again = sum(size * (m * times - 1) for size, times in sizes)
    yield Flow("data" if near == n else "shard", "parameters", ops - first, again * n // near * (near - 1))


def _times(unit: _Unit) -> int:
    return unit.forward + unit.backward


def updated(job: Job, share: Share) -> int:
    """Return the elements that the rank updates, padding included."""
    return sum(_shard(job, unit) * unit.count for unit in _units(job, share))


def _units(job: Job, share: Share) -> list[_Unit]:
    last = job.shape.layers + 1
    parts = [range(1)] * share.embedding + [range(last, last + 1)] * share.head
    found = [_unit(job, unit, unit.name, 1) for unit in job.units(parts)] if parts else []
    found = [replace(u, forward=share.embedding + share.head) if u.name == "tied" else u for u in found]
    if share.blocks:
        (block,) = job.units([range(1, 2)])
        found.append(replace(_unit(job, block, "blocks", share.blocks), backward=1))
    return found


def _unit(job: Job, unit: UnitSize, name: str, count: int) -> _Unit:
    return _Unit(name, unit.padded(job.shard), unit.tail, count)


def _data(job: Job, own: list[_Unit]) -> Iterator[Flow]:
    n, m, axis = job.shard, job.micro_batches, job.shard_axis
    numbers, elements = sum(unit.count for unit in own), sum(unit.padded * unit.count for unit in own)
    times = m if job.shards_gradients else 1 if job.shards_optimizer else 2
    if n > 1:
        ops = numbers * (m if job.shards_gradients else 1)
        each = sum(unit.count * sent_bytes(unit.padded // n, job.gradient_bits, job.bytes.summed) for unit in own)
        if job.gradient_hops is None:
            yield Flow(axis, "gradients", ops, times * (n - 1) * each)
        else:
            near, far = job.gradient_hops
            yield Flow("shard", "gradients", ops, times * (near - 1) * far * each)
            yield Flow("replica", "gradients", ops, times * (far - 1) * each)
    if n > 1 and job.shards_optimizer and not job.shards_parameters:
        yield Flow(axis, "parameters", numbers, elements // n * (n - 1) * job.bytes.parameter)
    if job.replicas > 1:
        elements = sum(unit.count * -(-_shard(job, unit) // job.replicas) for unit in own)
        yield Flow("replica", "gradients", numbers, 2 * (job.replicas - 1) * elements * job.bytes.summed)


def _tensor(job: Job, share: Share) -> Iterator[Flow]:
    t, m, item = job.tensor, job.micro_batches, job.bytes.parameter
    if t == 1:
        return
    rows = job.shape.seq_len * job.micro_batch
    n = -(-rows * job.shape.hidden // t) * (t - 1) * item  # of an all-gather; an all-reduce sends twice that
    blocks, full, sequence = share.blocks * m, job.recompute == "full", job.sequence
    chunks = job.tensor_chunks  # which change how many operations there are, and no byte

    def flow(purpose: str, ops: int, chunks: int = 1) -> Flow:
        return Flow("tensor", purpose, ops * chunks, ops * n * (1 if sequence or purpose == "inputs" else 2))

    again = (3 if sequence else 1) * full
    yield flow("block forward", blocks * ((4 if sequence else 2) + again), chunks)
    yield flow("block backward", blocks * (4 if sequence else 2))
    yield flow("block again", blocks * 2 * sequence)
    if share.embedding:
        yield flow("embedding forward", m)
        yield flow("embedding backward", m * sequence)
    if share.head:
        yield flow("head forward", m * sequence, chunks)
        yield flow("head again", m * sequence)
        yield flow("head backward", m)
        yield Flow("tensor", "loss", m, m * 3 * rows * (t - 1) * max(item, 4))
    if job.partition and full and not sequence:
        yield flow("inputs", blocks)


def _tails(job: Job, own: list[_Unit], shard_rank: int) -> Iterator[Flow]:
    """Yield what is summed over the tensor axis once a step under sequence parallelism."""
    if not job.sequence:
        return
    t, item = job.tensor, job.bytes.gradient
    for unit in own:
        length = _tail(job, unit, shard_rank)
        if t > 1 and length:
            yield Flow("tensor", "tail", unit.count, unit.count * 2 * (t - 1) * -(-length // t) * item)
        if (there := _AXIS.get(job.gradients_home)) is not None:
            yield Flow(there, "gradients back", unit.count, unit.count * length * item)
            yield Flow(there, "gradients out", unit.count, unit.count * length * item)


def _tail(job: Job, unit: _Unit, shard_rank: int) -> int:
    """Return the elements of a rank's shard that lie in the unit's tail."""
    shard = _shard(job, unit)
    start = shard_rank * shard if job.shards_optimizer else 0
    return max(0, shard - max(0, unit.tail - start))


def _shard(job: Job, unit: _Unit) -> int:
    """Return the elements of a unit that a rank updates."""
    return unit.padded // job.shard if job.shards_optimizer else unit.padded


def _pipeline(job: Job, share: Share) -> Iterator[Flow]:
    rows = job.micro.local(job.shape.seq_len * job.micro_batch)
    size, m = rows * job.shape.hidden * job.bytes.parameter, job.micro_batches
    yield Flow("pipeline", "activations", m * share.sends, m * share.sends * size)
    yield Flow("pipeline", "gradients", m * share.returns, m * share.returns * size)


def _tied(job: Job, share: Share, own: list[_Unit]) -> list[_Unit]:
    """Return the tied unit where another rank has it too, else nothing."""
    both = share.embedding and share.head
    return [unit for unit in own if unit.name == "tied" and job.pipeline > 1 and not both]


def _scalars(job: Job, share: Share, own: list[_Unit]) -> Iterator[Flow]:
    """Yield the sums of the tied weight's gradient, the norm and the loss."""
    for unit in _tied(job, share, own):
        yield Flow("ends", "tied", 1, _shard(job, unit) * job.bytes.summed)
    counted = sum(unit.count for unit in own)
    everywhere = job.shape.layers + job.shape.tie_embeddings + _ends(job)
    sums = [("tensor", "norm", counted), ("pipeline", "norm", everywhere), ("world", "loss", TOTALS)]
    if job.shards_optimizer:
        sums.append((job.shard_axis, "norm", counted))
    if job.replicas > 1:
        sums.append(("replica", "norm", counted))
    for axis, purpose, numbers in sums:
        size = axis_size(job, axis)
        yield Flow(axis, purpose, int(size > 1), 2 * (size - 1) * -(-numbers // size) * WIDE)


def _ends(job: Job) -> int:
    """Return the number of units of embedding and head beside a tied one."""
    return 2 if job.shape.learned_positions or not job.shape.tie_embeddings else 1


def _from_disks(job: Job, share: Share, own: list[_Unit]) -> Iterator[Flow]:
    """Yield what the norm and the update of a step read from disks, and write back."""
    item, gradients = job.bytes, job.gradients_home == "nvme"
    numbers, shard = sum(unit.count for unit in own), sum(_shard(job, unit) * unit.count for unit in own)
    states = 3 * item.master  # masters and two moments
    if gradients:
        yield Flow("disk", "gradients back", numbers, shard * item.gradient)
    yield Flow("disk", "optimizer back", (3 + gradients) * numbers, shard * (states + gradients * item.gradient))
    rounded = job.offload_parameters == "nvme" and item.master != item.parameter
    yield Flow("disk", "optimizer out", (3 + rounded) * numbers, shard * (states + rounded * item.parameter))


def _host(job: Job, share: Share, own: list[_Unit]) -> Iterator[Flow]:
    """Yield what goes to the host or to disks, and comes back."""
    m, g, p = job.micro_batches, job.bytes.gradient, job.bytes.parameter
    numbers, shard = sum(unit.count for unit in own), sum(_shard(job, unit) * unit.count for unit in own)
    if (there := _AXIS.get(job.gradients_home)) is not None:
        times = m if job.shards_gradients else 1
        yield Flow(there, "gradients out", times * numbers, times * shard * g)
        yield Flow(there, "gradients back", (times - 1) * numbers, (times - 1) * shard * g)
        if job.replicas > 1:
            yield Flow(there, "gradients back", numbers, shard * g)
            yield Flow(there, "gradients out", numbers, shard * g)
        for unit in _tied(job, share, own):
            yield Flow(there, "gradients back", 1, _shard(job, unit) * g)
            yield Flow(there, "gradients out", 1, _shard(job, unit) * g)
    if job.offload_optimizer == "nvme":
        yield from _from_disks(job, share, own)
    if job.optimizer_away and (job.offload_optimizer == "cpu" or job.apart) and not job.parameters_away:
        yield Flow("host", "parameters back", numbers, shard * p)
    if job.shard > 1:
        yield from _gathers_of(job, own)
    if job.parameters_away:
        there = _AXIS[job.offload_parameters]
        ops = m * sum(unit.count * _times(unit) for unit in own)
        gathered = m * sum(unit.padded * unit.count * _times(unit) for unit in own)
        if job.secondary_ranks is not None:  # once a step
            ops, gathered = numbers, shard * job.shard
        yield Flow(there, "parameters back", ops, gathered // job.shard * p)
        # A disk's update writes parameters where they are; the host's only those of the host.
        if job.offload_optimizer != "nvme" and not job.one_home:
            yield Flow(there, "parameters out", numbers, shard * p)
    if (away := _AXIS.get(job.offload)) is not None and job.recompute == "full":
        split = job.tensor if job.sequence or job.partition else 1
        size = job.shape.seq_len * job.micro_batch * job.shape.hidden // split * p
        yield Flow(away, "inputs out", m * share.blocks, m * share.blocks * size)
        yield Flow(away, "inputs back", m * share.blocks, m * share.blocks * size)
