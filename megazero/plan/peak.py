"""The most that a step's activations and their gradients take on one rank, on top of what it holds all the time.

Forward only adds to what is kept, so the most is there in a backward, right after the forward of the micro-batch that
is the last to be live: in the head, or in the last block of the stage, whose layers are walked through here from the
last to the first. At each there is what it and all layers before it keep, the gradient of the residual stream, and what
the layer itself needs (`layers.py`). A product needs, with N = T h e of the whole sequence and n = T' h e:

    column       the gradients of its outputs, N of its inputs; with sequence parallelism N + n more: the inputs
                 gathered for the weight's gradient, what comes of the sum
    row          the gradient of its inputs; with sequence parallelism N, the gradient gathered; with dropout n, the
                 gradient that is masked

Where gradients are wider than parameters, a weight's gradient is made in the narrow type first: a matrix more. The
loss has 2 n + V + N: the last norm's input and output, the logits (their gradient takes their place), the gradient of
what they were made from. Selective recompute holds the input and the output of attention's core until all of its
backward is done. With full recompute the block that is replayed has its input in the arena.
"""

from collections.abc import Iterator

from megazero.plan.activations import bytes_of, kept_by_block, kept_by_layer, logits, spared_by_layer, wide
from megazero.plan.job import Job
from megazero.plan.layers import Layer, Moment, Width
from megazero.plan.layers import head as head_layers


def moments(job: Job, blocks: int, *, head: bool, fused: bool) -> Iterator[tuple[int, str]]:
    """Yield (bytes, where in backward) of one micro-batch on a stage; the largest is its peak.

    Args:
        blocks: their number on this stage.
        head: the stage has it too.
        fused: operations make no copies of their own.
    """
    kept = blocks * kept_by_block(job, job.recompute) if job.recompute != "full" else 0
    if head:
        norm, projection = head_layers(job.shape)
        narrow = job.shape.vocab * _narrow(job, 1, job.shape.hidden)
        yield kept + 2 * job.stream + logits(job) + _of_column(job, projection) + narrow, "loss"
        for moment in _shown(norm, fused):
            yield kept + job.stream + _bytes(job, moment), moment.name
    if not blocks:
        return
    whole = job.tokens * job.shape.hidden * job.bytes.parameter
    kept += kept_by_block(job) - job.stream if job.recompute == "full" else 0
    core = [layer for layer in job.block if layer.core] if job.recompute == "selective" else []
    for layer in reversed(job.block):
        if core and layer is core[-1]:  # all of it runs again, before its first backward
            kept += sum(spared_by_layer(job, each) for each in core)
        replay = bytes_of(job, core[-1].kept, job.bytes.parameter) + whole // job.tensor if layer in core else 0
        for moment in _shown(layer, fused):
            yield kept + job.stream + replay + _bytes(job, moment), moment.name
        if layer.product is not None:
            yield kept + job.stream + _of_product(job, layer), layer.name
        kept -= kept_by_layer(job, layer)


def _of_product(job: Job, layer: Layer) -> int:
    """Return the bytes that a product needs in its backward."""
    item, rows = job.bytes.parameter, layer.split[0]
    if layer.product == "column":
        own = bytes_of(job, Width(split=layer.outputs), item) + _of_column(job, layer)
    else:
        own = bytes_of(job, Width(job.shape.hidden if job.shape.dropout else 0, layer.inputs), item)
        own += job.tokens * layer.outputs * item if job.sequence else 0
    return own + _narrow(job, *rows)


def _of_column(job: Job, layer: Layer) -> int:
    """Return the bytes of the gradient of a column product's input, and with sequence parallelism of its sum."""
    item, whole = job.bytes.parameter, job.tokens * layer.inputs
    return (whole + job.sequence * (whole + job.local(whole))) * item


def _narrow(job: Job, rows: int, columns: int) -> int:
    """Return the bytes of a weight's gradient in the narrow type, where it accumulates in a wider one."""
    item = job.bytes.parameter
    return rows * columns * item // job.tensor if job.bytes.gradient > item else 0


def _shown(layer: Layer, fused: bool) -> Iterator[Moment]:
    return (moment for moment in layer.moments if not (fused and moment.reference))


def _bytes(job: Job, moment: Moment) -> int:
    item = job.bytes.parameter
    each = (moment.values, item), (moment.wide, wide(item)), (moment.words, 4)
    return sum(bytes_of(job, width, size) for width, size in each)
