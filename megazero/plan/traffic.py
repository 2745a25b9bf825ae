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

    pipeline        n' for each micro-batch and neighbour stage on another rank
    ends            the tied weight's reduced gradient, 2 / 2 = 1 of each element
    norm, loss      fp64 scalars: a sum of squares for each unit, the loss and the count of its tokens
    host            what is offloaded, to and fro

In stage 3 a forward gathers every unit of the stage; a backward those of the blocks, because the embedding needs none
and the head's are still there.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.plan.layout import Layout
from megazero.plan.states import ALIGNMENT, UnitSize, units

WIDE = 8  # bytes of a scalar that ranks sum


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
    """

    name: str
    padded: int
    tail: int
    count: int


def share_of(layout: Layout, rank: int) -> Share:
    """Return the share of one rank of the pipeline axis."""
    layers, last = layout.layers, layout.shape.layers + 1
    stages = layers.of_rank(rank)
    own = [i for parts in stages.values() for i in parts]
    remote = [stage for stage in stages if stage + 1 < len(layers.parts) and layers.rank_of[stage + 1] != rank]
    back = [stage for stage in stages if stage > 0 and layers.rank_of[stage - 1] != rank]
    return Share(sum(0 < i < last for i in own), 0 in own, last in own, len(remote), len(back))


def traffic(layout: Layout, rank: int = 0, shard_rank: int | None = None) -> dict[str, dict[str, int]]:
    """Return the bytes that a rank sends in a step: `[axis][purpose]`, with `host` for copies to and from its memory.

    Args:
        rank: its number on the pipeline axis.
        shard_rank: its number on the shard axis; None: the last, whose shards have most of the tails: none sends more.
    """
    found: dict[str, dict[str, int]] = {}
    for flow in flows(layout, share_of(layout, rank), shard_rank):
        if flow.bytes:
            purposes = found.setdefault(flow.axis, {})
            purposes[flow.purpose] = purposes.get(flow.purpose, 0) + flow.bytes
    return found


def sent(found: dict[str, dict[str, int]]) -> int:
    """Return the bytes sent to other ranks, over all axes and purposes."""
    return sum(size for axis, purposes in found.items() if axis != "host" for size in purposes.values())


def fullest(layout: Layout) -> int:
    """Return the pipeline rank that sends most."""
    return max(range(layout.pipeline), key=lambda rank: sent(traffic(layout, rank)))


def split_by_node(layout: Layout, found: dict[str, dict[str, int]], devices: int) -> dict[str, dict[str, int]]:
    """Return the `in_node` and `cross_node` bytes of each axis.

    A ring with k ranks in each node crosses nodes on every k-th of its links, so 1 / k of what the ranks send crosses.
    The ranks of an axis are `stride` apart, tensor fastest.

    Args:
        devices: their number in a node.
    """
    result: dict[str, dict[str, int]] = {}
    for axis, purposes in found.items():
        if axis == "host":
            continue
        together = ranks_in_node(layout, axis, devices)
        size = sum(purposes.values())
        cross = 0 if together >= axis_size(layout, axis) else size // together
        result[axis] = {"in_node": size - cross, "cross_node": cross}
    return result


def axis_size(layout: Layout, axis: str) -> int:
    sizes = {"tensor": layout.tensor, "shard": layout.shard, "replica": layout.replicas, "data": layout.data}
    return {**sizes, "pipeline": layout.pipeline, "ends": 2}[axis]


def ranks_in_node(layout: Layout, axis: str, devices: int) -> int:
    """Return how many ranks of one axis lie in one node of so many devices.

    Where groups straddle nodes, about half of the worst group.
    """
    if layout.ranks <= devices:
        return axis_size(layout, axis)
    across = layout.tensor * layout.data
    strides = {"tensor": 1, "shard": layout.tensor, "data": layout.tensor, "replica": layout.tensor * layout.shard}
    stride = {**strides, "pipeline": across, "ends": across * (layout.pipeline - 1)}[axis]
    size, together = axis_size(layout, axis), max(1, devices // stride)
    if together >= size and devices % (size * stride):
        return max(1, size // 2)
    return min(size, together)


def flows(layout: Layout, share: Share, shard_rank: int | None = None) -> Iterator[Flow]:
    """Yield everything that a rank with this share of the model sends in a step, and receives from its host."""
    own = _units(layout, share)
    yield from _data(layout, own)
    yield from _tensor(layout, share)
    yield from _tails(layout, own, layout.shard - 1 if shard_rank is None else shard_rank)
    yield from _pipeline(layout, share)
    yield from _scalars(layout, share, own)
    yield from _host(layout, share, own)


def gathers(layout: Layout, share: Share) -> tuple[int, int]:
    """Return the elements that stage 3 gathers for the forward, and for the backward, of one micro-batch."""
    own = {unit.name: unit for unit in _units(layout, share)}
    blocks = own["blocks"].padded * own["blocks"].count if "blocks" in own else 0
    tied = own["tied"].padded if "tied" in own else 0
    ends = tied * (share.embedding + share.head) + sum(
        own[name].padded for name in ("embedding", "head") if name in own
    )
    return blocks + ends, blocks


def updated(layout: Layout, share: Share) -> int:
    """Return the elements that the rank updates, padding included."""
    return sum(_shard(layout, unit) * unit.count for unit in _units(layout, share))


def _units(layout: Layout, share: Share) -> list[_Unit]:
    shape, last = layout.shape, layout.shape.layers + 1
    parts = [range(1)] * share.embedding + [range(last, last + 1)] * share.head
    found = [_unit(layout, unit, unit.name, 1) for unit in units(shape, layout.tensor, parts)] if parts else []
    if share.blocks:
        (block,) = units(shape, layout.tensor, [range(1, 2)])
        found.append(_unit(layout, block, "blocks", share.blocks))
    return found


def _unit(layout: Layout, unit: UnitSize, name: str, count: int) -> _Unit:
    shape, split = layout.shape, 0
    if name == "blocks" and shape.layernorm:
        split = (shape.hidden + 2 * shape.kv_width + shape.num_mlp_inputs * shape.ffn) // layout.tensor
    tail = -(-unit.decayed // ALIGNMENT) * ALIGNMENT + split if unit.rest else unit.decayed
    return _Unit(name, unit.padded(layout.shard), tail, count)


def _data(layout: Layout, own: list[_Unit]) -> Iterator[Flow]:
    n, m, axis = layout.shard, layout.micro_batches, layout.shard_axis
    numbers, elements = sum(unit.count for unit in own), sum(unit.padded * unit.count for unit in own)
    each = elements // n * (n - 1)
    times = {0: 2, 1: 1, 2: m, 3: m}[layout.stage]
    if n > 1:
        ops = numbers * (m if layout.stage >= 2 else 1)
        yield Flow(axis, "gradients", ops, times * each * layout.bytes.gradient)
    if n > 1 and layout.stage in (1, 2):
        yield Flow(axis, "parameters", numbers, each * layout.bytes.parameter)
    if layout.replicas > 1:
        elements = sum(unit.count * -(-_shard(layout, unit) // layout.replicas) for unit in own)
        yield Flow("replica", "gradients", numbers, 2 * (layout.replicas - 1) * elements * layout.bytes.gradient)


def _stage_3(layout: Layout, share: Share) -> tuple[int, int]:
    """Return the gathers of stage 3 in a step: operations, and elements of the units."""
    if layout.stage != 3:
        return 0, 0
    forward, backward = gathers(layout, share)
    ends = 2 * (share.embedding + share.head)
    return layout.micro_batches * (2 * share.blocks + ends), layout.micro_batches * (forward + backward)


def _tensor(layout: Layout, share: Share) -> Iterator[Flow]:
    t, m, item = layout.tensor, layout.micro_batches, layout.bytes.parameter
    if t == 1:
        return
    rows = layout.shape.seq_len * layout.micro_batch
    n = -(-rows * layout.shape.hidden // t) * (t - 1) * item  # of an all-gather; an all-reduce sends twice that
    blocks, full, sequence = share.blocks * m, layout.recompute == "full", layout.sequence

    def flow(purpose: str, ops: int) -> Flow:
        return Flow("tensor", purpose, ops, ops * n * (1 if sequence or purpose == "inputs" else 2))

    again = (3 if sequence else 1) * full
    yield flow("block forward", blocks * ((4 if sequence else 2) + again))
    yield flow("block backward", blocks * (4 if sequence else 2))
    yield flow("block again", blocks * 2 * sequence)
    if share.embedding:
        yield flow("embedding forward", m)
        yield flow("embedding backward", m * sequence)
    if share.head:
        yield flow("head forward", m * sequence)
        yield flow("head again", m * sequence)
        yield flow("head backward", m)
        yield Flow("tensor", "loss", m, m * 3 * rows * (t - 1) * max(item, 4))
    if layout.partition and full and not sequence:
        yield flow("inputs", blocks)


def _tails(layout: Layout, own: list[_Unit], shard_rank: int) -> Iterator[Flow]:
    """Yield what is summed over the tensor axis once a step under sequence parallelism."""
    if not layout.sequence:
        return
    t, item = layout.tensor, layout.bytes.gradient
    for unit in own:
        length = _tail(layout, unit, shard_rank)
        if t > 1 and length:
            yield Flow("tensor", "tail", unit.count, unit.count * 2 * (t - 1) * -(-length // t) * item)
        if layout.offload_optimizer:
            yield Flow("host", "gradients back", unit.count, unit.count * length * item)
            yield Flow("host", "gradients out", unit.count, unit.count * length * item)


def _tail(layout: Layout, unit: _Unit, shard_rank: int) -> int:
    """Return the elements of a rank's shard that lie in the unit's tail."""
    shard = _shard(layout, unit)
    start = shard_rank * shard if layout.stage >= 1 else 0
    return max(0, shard - max(0, unit.tail - start))


def _shard(layout: Layout, unit: _Unit) -> int:
    """Return the elements of a unit that a rank updates."""
    return unit.padded // layout.shard if layout.stage >= 1 else unit.padded


def _pipeline(layout: Layout, share: Share) -> Iterator[Flow]:
    rows = layout.shape.seq_len // (layout.tensor if layout.sequence else 1) * layout.micro_batch
    size, m = rows * layout.shape.hidden * layout.bytes.parameter, layout.micro_batches
    yield Flow("pipeline", "activations", m * share.sends, m * share.sends * size)
    yield Flow("pipeline", "gradients", m * share.returns, m * share.returns * size)


def _tied(layout: Layout, share: Share, own: list[_Unit]) -> list[_Unit]:
    """Return the tied unit where another rank has it too, else nothing."""
    both = share.embedding and share.head
    return [unit for unit in own if unit.name == "tied" and layout.pipeline > 1 and not both]


def _scalars(layout: Layout, share: Share, own: list[_Unit]) -> Iterator[Flow]:
    """Yield the sums of the tied weight's gradient, the norm and the loss."""
    tied = _tied(layout, share, own)
    for unit in tied:
        yield Flow("ends", "tied", 1, _shard(layout, unit) * layout.bytes.gradient)
    copies = len(tied) if share.head else 0
    counted = sum(unit.count for unit in own) - copies
    everywhere = layout.shape.layers + layout.shape.tied + _ends(layout)
    sums = [("tensor", "norm", counted), ("pipeline", "norm", everywhere), ("data", "loss", 2), ("pipeline", "loss", 2)]
    if layout.stage >= 1:
        sums.append((layout.shard_axis, "norm", counted))
    for axis, purpose, numbers in sums:
        size = axis_size(layout, axis)
        yield Flow(axis, purpose, int(size > 1), 2 * (size - 1) * -(-numbers // size) * WIDE)


def _ends(layout: Layout) -> int:
    """Return the number of units of embedding and head beside a tied one."""
    return 2 if layout.shape.learned_positions or not layout.shape.tied else 1


def _host(layout: Layout, share: Share, own: list[_Unit]) -> Iterator[Flow]:
    m, g, p = layout.micro_batches, layout.bytes.gradient, layout.bytes.parameter
    numbers, shard = sum(unit.count for unit in own), sum(_shard(layout, unit) * unit.count for unit in own)
    if layout.offload_optimizer:
        times = m if layout.stage >= 2 else 1
        yield Flow("host", "gradients out", times * numbers, times * shard * g)
        yield Flow("host", "gradients back", (times - 1) * numbers, (times - 1) * shard * g)
        for unit in _tied(layout, share, own):
            yield Flow("host", "gradients back", 1, _shard(layout, unit) * g)
            yield Flow("host", "gradients out", 1, _shard(layout, unit) * g)
        if not layout.offload_parameters:
            yield Flow("host", "parameters back", numbers, shard * p)
    ops, gathered = _stage_3(layout, share)
    if layout.shard > 1:
        sent = gathered // layout.shard * (layout.shard - 1) * p
        yield Flow(layout.shard_axis, "parameters", ops, sent)
    if layout.offload_parameters:
        yield Flow("host", "parameters back", ops, gathered // layout.shard * p)
        if not layout.offload_optimizer:
            yield Flow("host", "parameters out", numbers, shard * p)
    if layout.offload and layout.recompute == "full":
        split = layout.tensor if layout.sequence or layout.partition else 1
        size = layout.shape.seq_len * layout.micro_batch * layout.shape.hidden // split * p
        yield Flow("host", "inputs out", m * share.blocks, m * share.blocks * size)
        yield Flow("host", "inputs back", m * share.blocks, m * share.blocks * size)
