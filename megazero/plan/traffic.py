"""The bytes that one rank sends in a step, in closed form, by axis and purpose, as the ledger of a run counts them.

Elements are counted by the ring formula (`comm/ledger.py`). N, t, p are the ranks of the shard, tensor and pipeline
axes, m the micro-batches, P the padded elements of a rank's units, and n = s b h the elements of a micro-batch's
residual stream; n' = n/t with sequence parallelism and n without. The unit is bytes x (N - 1) / N on the data axis, and
bytes x (t - 1) / t on the tensor axis:

    gradients       stage 0: 2 P   1: P   2, 3: m P              Rajbhandari et al. 2019 (arXiv 1910.02054), section 7:
    parameters      stages 1, 2: P   3: 2 m P, less the ends     2 P, 2 P, 3 P in all with one micro-batch

    block           forward 4 n, backward 4 n                    8 b s h: Narayanan et al. 2021 (arXiv 2104.04473), 3.2
                    full recompute: 2 n more, because a replay leaves out its last sum; the ZeRO paper counts 12 in all
                    (section 8)
                    sequence parallelism: 2 n more, to gather the inputs of column products again (arXiv 2205.05198,
                    section 4.2.2), and 3 n in a replay
    inputs          Pa: n for each block, 1/12 of the sums in the paper, 1/10 of those here
    embedding       forward 2 n; sequence: n forward, n backward
    head            backward 2 n; sequence: n forward, n again, n backward
    loss            3 numbers for each token
    qk norm         2 numbers for each token and pass, where all heads are normed together
    tail            2 for each element of a shard whose gradient is partial: under sequence parallelism those of
                    parameters that are whole on every tensor rank; always those that a rank uses on its own heads

    replica         gradients 2 P / N, once a step, in units of bytes x (R - 1) / R for R shard groups

Gradients on the data and replica axes and at the ends are counted in bytes of `zero.reduce_dtype`; values that are
quantised between shard ranks (`zero.quantize`) in bytes of codes and scales (`base/quantized.py`).

    pipeline        n' for each micro-batch and neighbour stage on another rank
    ends            the tied weight's reduced gradient, 2 / 2 = 1 of each element
    matrices        parts of matrices that one rank updates whole, and their updates (`waves.py`)
    norm, loss      fp64 scalars: a sum of squares for each unit and norm of clipping; over all ranks the loss, the
                    count of its tokens, and the votes on ending the run
    host, disk      copies to and from offloaded state

In stage 3 a forward gathers every unit of the stage. A backward gathers those of the blocks only, because the embedding
needs no parameters and the head's are still gathered.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.base.quantized import sent_bytes
from megazero.plan import waves
from megazero.plan.activations import kept_input
from megazero.plan.heads import counts
from megazero.plan.job import Job
from megazero.plan.layers import products
from megazero.plan.links import axis_size
from megazero.plan.share import Share, share_of

_AXIS = {"cpu": "host", "nvme": "disk"}  # where offloaded state goes, as the ledger names it
WIDE = 8  # bytes of a scalar that ranks sum
TOTALS = 11  # scalars that all ranks sum in a step: loss, tokens, a sum that is not finite, votes (`zero/engine.py`)


@dataclass(frozen=True)
class Flow:
    """All operations of one purpose on one axis in a step.

    Attributes:
        axis, purpose: as the ledger names them.
        ops: number of operations.
        bytes: bytes that the rank sends in all of them.
    """

    axis: str
    purpose: str
    ops: int
    bytes: int


def traffic(
    job: Job, rank: int = 0, shard_rank: int | None = None, tensor_rank: int | None = None
) -> dict[str, dict[str, int]]:
    """Return the bytes that a rank sends in a step, [axis][purpose]; axes host and disk: its copies to and from them.

    Args:
        rank: number of the rank on the pipeline axis.
        shard_rank: its number on the shard axis; None: the last, which sends most, since its shards have most tails.
        tensor_rank: its number on the tensor axis; None: one that sends most.
    """
    found: dict[str, dict[str, int]] = {}
    for flow in flows(share_of(job, rank), shard_rank, tensor_rank):
        if flow.bytes:
            purposes = found.setdefault(flow.axis, {})
            purposes[flow.purpose] = purposes.get(flow.purpose, 0) + flow.bytes
    return found


def flows(own: Share, shard_rank: int | None = None, tensor_rank: int | None = None) -> Iterator[Flow]:
    """Yield everything that a rank with this share of a model sends in a step, and copies from host and disks."""
    job = own.job
    yield from _gradients(own)
    yield from _tensor(own)
    if job.tensor > job.shape.kv_heads:
        yield _heads(own, tensor_rank)
    yield from _tails(own, job.shard - 1 if shard_rank is None else shard_rank)
    yield from _matrices(own, shard_rank, tensor_rank)
    for purpose, stages in (("activations", own.sends), ("gradients", own.returns)):
        yield Flow("pipeline", purpose, job.micro_batches * stages, job.micro_batches * stages * job.stream)
    yield from _scalars(own)
    yield from _gradients_away(own)
    if job.offload_optimizer == "nvme":
        yield from _update_on_disks(own)
    if job.optimizer_away and (job.offload_optimizer == "cpu" or job.apart) and not job.parameters_away:
        yield Flow("host", "parameters back", own.count, own.updated * job.bytes.parameter)
    if job.shard > 1 and job.shards_parameters:
        yield from _gathers(own)
    if job.parameters_away:
        yield from _parameters_away(own)
    if job.recompute == "full" and job.offload != "none":
        ops = job.micro_batches * own.blocks
        yield from _back_and_out(_AXIS[job.offload], "inputs", ops, ops * kept_input(job))


def _gradients(own: Share) -> Iterator[Flow]:
    """Yield the reductions along the data axis, and the gathers of updated parameters in stages 1 and 2."""
    job = own.job
    n, axis, item = job.shard, job.shard_axis, job.bytes
    times = job.micro_batches if job.shards_gradients else 1 if job.shards_optimizer else 2
    if n > 1:
        ops = own.count * (job.micro_batches if job.shards_gradients else 1)
        each = sum(unit.count * sent_bytes(unit.padded // n, job.gradient_bits, item.summed) for unit in own.units)
        if job.gradient_hops is None:
            yield Flow(axis, "gradients", ops, times * (n - 1) * each)
        else:
            near, far = job.gradient_hops
            yield Flow("shard", "gradients", ops, times * (near - 1) * far * each)
            yield Flow("replica", "gradients", ops, times * (far - 1) * each)
    if n > 1 and job.shards_optimizer and not job.shards_parameters:
        elements = sum(unit.padded * unit.count for unit in own.units)
        yield Flow(axis, "parameters", own.count, elements // n * (n - 1) * item.parameter)
    if job.replicas > 1:
        elements = sum(unit.count * -(-unit.own // job.replicas) for unit in own.units)
        yield Flow("replica", "gradients", own.count, 2 * (job.replicas - 1) * elements * item.summed)


def _gathers(own: Share) -> Iterator[Flow]:
    """Yield the gathers of stage 3 over shard ranks, and those among neighbours that hold second shards."""
    job = own.job
    n, m, near = job.shard, job.micro_batches, job.secondary_ranks
    sizes = [
        (unit.count * sent_bytes(unit.padded // n, job.parameter_bits, job.bytes.parameter), unit.times)
        for unit in own.units
    ]
    ops = m * sum(unit.count * unit.times for unit in own.units)
    if near is None:
        yield Flow(job.shard_axis, "parameters", ops, m * (n - 1) * sum(size * times for size, times in sizes))
        return
    yield Flow("data", "parameters", own.count, (n - 1) * sum(size for size, _ in sizes))
    again = sum(size * (m * times - 1) for size, times in sizes)
    yield Flow("data" if near == n else "shard", "parameters", ops - own.count, again * n // near * (near - 1))


def _tensor(own: Share) -> Iterator[Flow]:
    job = own.job
    t, m, item = job.tensor, job.micro_batches, job.bytes.parameter
    if t == 1:
        return
    n = -(-job.tokens * job.shape.hidden // t) * (t - 1) * item  # of an all-gather; an all-reduce sends twice that
    blocks, full, sequence = own.blocks * m, job.recompute == "full", job.sequence
    chunks = job.tensor_chunks  # they change the number of operations, not the bytes

    def flow(purpose: str, ops: int, chunks: int = 1) -> Flow:
        return Flow("tensor", purpose, ops * chunks, ops * n * (1 if sequence or purpose == "inputs" else 2))

    kinds = [layer.product for layer in products(job)]
    columns, rows = kinds.count("column"), kinds.count("row")
    forward = rows + columns * sequence
    yield flow("block forward", blocks * (forward + (forward - job.omits_last) * full), chunks)
    yield flow("block backward", blocks * (columns + rows * sequence))
    yield flow("block again", blocks * columns * sequence)
    if job.shape.qk_norm == "full":  # sums of squares of queries and keys, in a replay too, and once in backward
        times = (2 + (job.recompute != "none")) * blocks
        yield Flow("tensor", "qk norm", times, times * 2 * (t - 1) * -(-2 * job.tokens // t) * max(item, 4))
    if own.embedding:
        yield flow("embedding forward", m)
        yield flow("embedding backward", m * sequence)
    if own.head:
        yield flow("head forward", m * sequence, chunks)
        yield flow("head again", m * sequence)
        yield flow("head backward", m)
        yield Flow("tensor", "loss", m, m * 3 * job.tokens * (t - 1) * max(item, 4))
    if job.partition and full and not sequence:
        yield flow("inputs", blocks)


def _heads(own: Share, tensor_rank: int | None) -> Flow:
    """Return the exchange of parts of projections between ranks that share a key-value head."""
    job, ranks, to = own.job, range(own.job.tensor), counts(own.job.shape, own.job.tensor)
    forward, passes = 1 + (job.recompute == "full"), own.blocks * job.micro_batches
    sent = [sum(forward * to[i][j] + to[j][i] for j in ranks if j != i) for i in ranks]
    elements = job.tokens * (max(sent) if tensor_rank is None else sent[tensor_rank])
    return Flow("tensor", "heads", passes * (forward + 1), passes * elements * job.bytes.parameter)


def _matrices(own: Share, shard_rank: int | None, tensor_rank: int | None) -> list[Flow]:
    """Return the exchanges of matrices of a rank; where its numbers are None, of a rank that sends most."""
    if not own.job.optimizers.whole:
        return []
    sent = waves.messages(own.job.at_rest, own.rank, shard_rank, tensor_rank)
    return [Flow(axis, "matrices", ops, size) for axis, ops, size in sent]


def _tails(own: Share, shard_rank: int) -> Iterator[Flow]:
    """Yield the sums of the tails over the tensor axis, once a step."""
    job = own.job
    t, item = job.tensor, job.bytes.gradient
    for unit in own.units:
        if unit.tail is None:
            continue
        start = shard_rank * unit.own if job.shards_optimizer else 0
        length = max(0, unit.own - max(0, unit.tail - start))  # elements of the rank's shard in the tail
        if t > 1 and length:
            yield Flow("tensor", "tail", unit.count, unit.count * 2 * (t - 1) * -(-length // t) * item)
        if job.gradients_home != "none":
            yield from _back_and_out(_AXIS[job.gradients_home], "gradients", unit.count, unit.count * length * item)


def _scalars(own: Share) -> Iterator[Flow]:
    """Yield the sums of the tied weight's gradient, the norm and the loss."""
    job = own.job
    for unit in own.tied:
        yield Flow("ends", "tied", 1, unit.own * job.bytes.summed)
    ends = 2 if job.shape.learned_positions or not job.shape.tie_embeddings else 1  # units without the tied one
    everywhere, here = (job.shape.layers + job.shape.tie_embeddings + ends) * job.norms, own.count * job.norms
    sums = [("tensor", "norm", here), ("pipeline", "norm", everywhere), ("world", "loss", TOTALS)]
    sums += [(job.shard_axis, "norm", here)] * job.shards_optimizer
    sums += [("replica", "norm", here)] * (job.replicas > 1)
    for axis, purpose, numbers in sums:
        size = axis_size(job, axis)
        yield Flow(axis, purpose, int(size > 1), 2 * (size - 1) * -(-numbers // size) * WIDE)


def _gradients_away(own: Share) -> Iterator[Flow]:
    """Yield the copies of gradients to the tier where they wait for the update, and back for further sums."""
    job = own.job
    if job.gradients_home == "none":
        return
    there, item, shard = _AXIS[job.gradients_home], job.bytes.gradient, own.updated
    times = job.micro_batches if job.shards_gradients else 1
    yield Flow(there, "gradients out", times * own.count, times * shard * item)
    yield Flow(there, "gradients back", (times - 1) * own.count, (times - 1) * shard * item)
    if job.replicas > 1:
        yield from _back_and_out(there, "gradients", own.count, shard * item)
    for unit in own.tied:
        yield from _back_and_out(there, "gradients", 1, unit.own * item)


def _update_on_disks(own: Share) -> Iterator[Flow]:
    """Yield the disk reads and writes of a step's gradient norm and update."""
    job = own.job
    item, gradients, shard = job.bytes, job.gradients_home == "nvme", own.updated
    states, kinds = item.master + job.kept, 1 + len(job.kinds_kept)  # masters and state
    if gradients:
        yield Flow("disk", "gradients back", own.count, shard * item.gradient)
    yield Flow("disk", "optimizer back", (kinds + gradients) * own.count, shard * (states + gradients * item.gradient))
    rounded = job.offload_parameters == "nvme" and item.master != item.parameter
    yield Flow("disk", "optimizer out", (kinds + rounded) * own.count, shard * (states + rounded * item.parameter))


def _parameters_away(own: Share) -> Iterator[Flow]:
    """Yield the copies of parameters from the tier where they rest, and of updated ones to it."""
    job = own.job
    there, item = _AXIS[job.offload_parameters], job.bytes.parameter
    ops = job.micro_batches * sum(unit.count * unit.times for unit in own.units)
    gathered = job.micro_batches * sum(own.gathers)
    if job.secondary_ranks is not None:  # once a step
        ops, gathered = own.count, own.updated * job.shard
    yield Flow(there, "parameters back", ops, gathered // job.shard * item)
    # An update on disks writes parameters in place; an update on the host only those that rest on the host.
    if job.offload_optimizer != "nvme" and not job.one_home:
        yield Flow(there, "parameters out", own.count, own.updated * item)


def _back_and_out(axis: str, what: str, ops: int, size: int) -> Iterator[Flow]:
    """Yield the copies of data that is brought from host or disks, and of as much that is written there."""
    yield Flow(axis, f"{what} back", ops, size)
    yield Flow(axis, f"{what} out", ops, size)
