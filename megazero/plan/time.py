"""The seconds of a step, by part, in closed form.

One micro-batch on the busiest pipeline rank takes the seconds of `compute.py`, plus those of sums over the tensor axis
that no computation hides: all of a sum in forward; in backward the time by which a sum exceeds the weight gradient that
runs in parallel with it. With n chunks (`parallel.tensor_chunks`) forward waits for the first chunk of a sum in full,
and for each other chunk only as long as it exceeds the next chunk's product; products in pieces take longer, which is
counted too. `bubble.py` has the waits for other pipeline ranks and for messages.

Along the data axis, stages 0 and 1 reduce gradients during the last backward, stages 2 and 3 during each; updated
parameters are gathered during the next forward; stage 3 gathers during each forward and backward. A step waits for the
time by which traffic exceeds the computation that hides it, and at least for one unit's part, which nothing hides.
Systems that do not overlap wait for all traffic (`systems.py`).
"""

from dataclasses import dataclass

from megazero.plan.bubble import messages, waits
from megazero.plan.compute import Compute, PassTimes
from megazero.plan.flops import block_costs
from megazero.plan.job import Job
from megazero.plan.layers import products
from megazero.plan.links import AWAY, Links, exchanged
from megazero.plan.machines import Machine
from megazero.plan.share import Share
from megazero.plan.systems import OURS, System
from megazero.plan.traffic import Flow, flows
from megazero.plan.waves import operations


@dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds.

    Attributes:
        step_s: seconds from the step's begin to its end.
        parts: seconds of its parts, which add up to `step_s`.
        hidden: seconds of traffic that computation hides, by axis.
        bubble: the time that the busiest pipeline rank waits for others, divided by its work.
        tokens_per_second_per_device, tflops_per_device: throughput; the second counts the model's FLOPs.
        mfu, hfu: FLOP/s of the model, and FLOP/s executed, divided by the peak.
        micro: times of one micro-batch on a pipeline rank, the mean over all pipeline ranks.
    """

    step_s: float
    parts: dict[str, float]
    hidden: dict[str, float]
    bubble: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float
    hfu: float
    micro: PassTimes


def step_time(job: Job, machine: Machine, system: System = OURS) -> StepTime:
    """Return the time of a step.

    Raises:
        ValueError: the machine has no peak for the job's precision.
    """
    machine = system.on(machine)
    compute, links = Compute(job, machine, system), Links(job, machine)
    block = compute.block()
    sums = _sums(job, links, compute, block, system)
    first, last = _blocks(job)
    busy, work = _busiest(job, compute, block, sums, first, last)
    whole = block.plus(sums).times(job.shape.layers).plus(compute.head()).plus(compute.embedding())
    mean = whole.times(1 / job.pipeline)  # over all pipeline ranks
    m = job.micro_batches
    bubble = waits(job, mean)
    share = Share(job, job.kinds(range(first + 1)), True, job.pipeline == 1)
    own, gathered, elements = list(flows(share)), share.gathers, share.updated
    coded = compute.codes(own, m * sum(gathered), elements * job.shard * (m if job.shards_gradients else 1))
    data, hidden = _data(links, own, gathered, 1 / max(1, share.blocks), busy, system, coded)
    update, offload = _update(links, compute, own, elements, busy)
    parts = {
        "compute": m * work,
        "recompute": m * busy.again,
        "tensor traffic": m * (busy.forward + busy.backward - busy.again - work),
        "pipeline traffic": messages(job, links, system),
        "bubble": bubble,
        "data traffic": data,
        "update": update,
        "offload": offload,
    }
    step = sum(parts.values())
    tokens = job.global_batch * job.shape.seq_len / job.ranks
    model, done = compute.flops()
    rate = tokens / step
    return StepTime(
        step,
        parts,
        {"data": hidden},
        bubble / (m * (busy.forward + busy.backward)),
        rate,
        rate * model / 1e12,
        rate * model / compute.peak,
        rate * done / compute.peak,
        mean,
    )


def _sums(job: Job, links: Links, compute: Compute, block: PassTimes, system: System) -> PassTimes:
    """Return the seconds that a block waits for traffic on the tensor axis."""
    t = job.tensor
    if t == 1:
        return PassTimes(0.0, 0.0, 0.0)
    each = compute.tokens * job.shape.hidden * compute.item * (t - 1) / t
    one = links.seconds("tensor", 2 * each, 2)  # an all-reduce, or a gather and a reduce-scatter
    forward = _waits_of_chunks(job, links, compute, each)
    if system.sums == "all" and job.sequence:
        return _beside_products(one / 2, compute, block)
    columns = (0.0,) * len(block.columns) if system.sums == "none" else block.columns
    backward = sum(max(0.0, one - column) for column in columns)
    if job.sequence:  # row products wait for gathers; column products gather again and sum while others run
        backward = one + backward
    again = 0.0
    if job.recompute == "full":
        again = sum(forward[:-1] if compute.omits_last else forward)  # the last product's sum is left out with it
    return PassTimes(sum(forward), backward, 0.0, again)


def _waits_of_chunks(job: Job, links: Links, compute: Compute, each: float) -> list[float]:
    """Return the seconds that a block's forward waits for each sum, and with sequence parallelism for each gather.

    Args:
        each: bytes of a gather, or of a reduce-scatter: half an all-reduce.
    """
    chunks, times = job.tensor_chunks, 1 if job.sequence else 2
    one = links.seconds("tensor", times * each / chunks, times)
    rows = zip(products(job), compute.products(), compute.products(chunks), strict=True)
    return [
        one + (chunks - 1) * max(0.0, one - piece) + (chunks * piece - whole)
        for layer, whole, piece in rows
        if job.sequence or layer.product == "row"
    ]


def _beside_products(one: float, compute: Compute, block: PassTimes) -> PassTimes:
    """Return the seconds that a block waits where each gather and sum runs in parallel with a product, piece by piece.

    Forward has a gather or sum for each of the four products. Backward has one with each product's input gradient, and
    one with the weight gradient of each column product. No product hides the first piece of a ring, 1 / t of it.

    Args:
        one: seconds of a gather, or of a sum, if nothing runs in parallel.
    """
    t = compute.job.tensor
    forward = sum(_rest(one, product, 1 / t) for product in compute.products())
    weights = sum(_rest(one, column, 1 / t) for column in block.columns)
    return PassTimes(forward, forward + weights, 0.0, forward if compute.job.recompute == "full" else 0.0)


def _blocks(job: Job) -> tuple[int, int]:
    """Return the blocks of the busiest rank without the head, and of the rank with it, if all blocks cost the mean."""
    p, blocks = job.pipeline, job.shape.layers
    if p == 1:
        return blocks, blocks
    each, head = block_costs(job.shape)
    cost = head * blocks / sum(each)
    ideal = (blocks - (p - 1) * cost) / p
    counts = {max(1, int(ideal)), max(1, int(ideal) + 1)}
    last = min(counts, key=lambda count: max(-(-(blocks - count) // (p - 1)), count + cost))
    return -(-(blocks - last) // (p - 1)), last


def _busiest(
    job: Job, compute: Compute, block: PassTimes, sums: PassTimes, first: int, last: int
) -> tuple[PassTimes, float]:
    """Return (times of one micro-batch on the busiest rank, seconds of its computation without recompute and waits).

    `first` is the number of blocks of a rank without the head, `last` that of the rank with it.
    """
    each = block.plus(sums)
    begin, end = each.times(first).plus(compute.embedding()), each.times(last).plus(compute.head())
    if job.pipeline == 1:
        end = end.plus(compute.embedding())
    at_end = job.pipeline == 1 or end.forward + end.backward > begin.forward + begin.backward
    busy, count = (end, last) if at_end else (begin, first)
    waits = sums.times(count)
    return busy, busy.forward + busy.backward - busy.again - waits.forward - waits.input


def _data(
    links: Links,
    own: list[Flow],
    gathered: tuple[int, int],
    first: float,
    busy: PassTimes,
    system: System,
    coded: tuple[float, float],
) -> tuple[float, float]:
    """Return the seconds of data-axis and tied-weight traffic that a step waits for, and those that are hidden.

    Args:
        gathered: elements that stage 3 gathers in forward, and in backward.
        first: the share of the traffic that nothing hides.
        coded: seconds of the passes that quantise parameters, and gradients.
    """
    job, m = links.job, links.job.micro_batches

    def total(axis: str, purpose: str) -> float:
        found = [flow for flow in own if (flow.axis, flow.purpose) == (axis, purpose)]
        seconds = links.exchange if exchanged(job, axis, purpose) else links.seconds
        return sum(seconds(axis, flow.bytes, flow.ops) for flow in found)

    share_of_rate = system.scattered if job.shards_parameters else 1.0
    axis, replicas = job.shard_axis, total("replica", "gradients")
    reduces, parameters = (total(axis, what) / share_of_rate for what in ("gradients", "parameters"))
    if job.secondary_ranks is not None:
        parameters += total("shard", "parameters") / share_of_rate
    if job.gradient_hops is not None:
        reduces, replicas = reduces + total("shard", "gradients") + replicas, 0.0
    parameters, reduces = parameters + coded[0], reduces + coded[1]
    ends = total("ends", "tied")
    if job.data == 1:
        return ends, 0.0
    if not system.overlaps:
        return reduces + replicas + parameters + ends, 0.0
    times_reduced, times_gathered = m if job.shards_gradients else 1, m if job.shards_parameters else 1
    forward, backward = (part / max(1, sum(gathered)) for part in gathered) if job.shards_parameters else (1.0, 0.0)
    beside_backward = reduces / times_reduced + parameters * backward / times_gathered
    free = links.machine.reached.beside
    waited = times_gathered * _rest(parameters * forward / times_gathered, free * busy.forward, first)
    waited += times_reduced * _rest(beside_backward, free * busy.backward, first)
    return waited + replicas + ends, reduces + parameters - waited


def _rest(traffic: float, computation: float, first: float) -> float:
    """Return the seconds of traffic that a computation does not hide; the share `first` is never hidden."""
    return max(traffic - computation, traffic * first)


def _update(links: Links, compute: Compute, own: list[Flow], elements: int, busy: PassTimes) -> tuple[float, float]:
    """Return the seconds of the update on the device, and the seconds that a step waits for the host or disks."""
    job, m, machine = compute.job, compute.job.micro_batches, links.machine
    moved: dict[str, float] = {}
    for flow in own:
        if flow.axis in AWAY:
            moved[flow.purpose] = moved.get(flow.purpose, 0.0) + flow.bytes / _rate(machine, flow)
    out, back = (moved.get(f"inputs {way}", 0.0) for way in ("out", "back"))
    offload = max(0.0, out - m * busy.forward) + max(0.0, back - m * busy.backward)
    back = moved.get("parameters back", 0.0)
    if job.parameters_away:  # brought to the device during the passes
        offload += max(0.0, back - m * (busy.forward + busy.backward))
        back = 0.0
    exchanges = (links.exchange(flow.axis, flow.bytes, flow.ops) for flow in own if flow.purpose == "matrices")
    matrices = operations(job.at_rest, 0) / (compute.peak * machine.reached.matmul) + sum(exchanges)
    if not job.optimizer_away:
        return compute.update(elements) + matrices, offload
    bandwidth = machine.host_memory_bandwidth or machine.host_link_bandwidth
    update = elements * job.bytes.moved_by_update(job.kept) / bandwidth
    # A disk reads and writes in turns, while the update runs.
    update = max(update, sum(moved.get(f"optimizer {way}", 0.0) for way in ("out", "back")))
    if job.delayed:  # the next step hides it, and waits for the rest at its end
        update = max(0.0, update - m * (busy.forward + busy.backward))
    gradients = max(0.0, sum(moved.get(f"gradients {way}", 0.0) for way in ("out", "back")) - m * busy.backward)
    return matrices, offload + gradients + max(update, back)


def _rate(machine: Machine, flow: Flow) -> float:
    """Return bytes a second of a flow to or from the host or a disk. Raises ValueError: the disks are not known."""
    if flow.axis == "host":
        return machine.host_link_bandwidth
    if machine.disk is None:
        raise ValueError(f"the disks of {machine.name} are not known")
    return machine.disk.read if flow.purpose.endswith("back") else machine.disk.write
