"""Compute the peak of a step's activations and their gradients on one rank, beyond what the rank always holds.

Forward only adds kept activations, so the peak is in a backward, right after the forward of the last micro-batch that
becomes live: in the head, or in the last block of each kind, whose layers are walked here from last to first. At each
layer, memory has the kept activations of this layer and all before it, the gradient of the residual stream, and the
layer's own needs (`layers.py`). With N = T h e bytes for the whole sequence and n = T' h e, a product needs:

    column       the gradients of its outputs, and N for those of its inputs; with sequence parallelism N + n more: the
                 inputs gathered for the weight's gradient, and the result of the reduce-scatter
    row          the gradient of its inputs; with sequence parallelism N more, the gathered gradient; with dropout or a
                 scale n more, the gradient of the branch, and n more if a norm ends it

Where gradients are wider than parameters, a weight's gradient is first computed in the narrow dtype: one more matrix.
The loss needs 2 n + V + N: the last norm's input and output, the logits that exist at a time (V; their gradient
overwrites them; 2 V with a cap, for its slope), and the gradient of the projection's input; and for each token its
target and five numbers.
Selective recompute holds the input and output of attention's core until all of its backward is done. With full
recompute the replayed block's input is not counted here, but as `inputs` (`memory.py`).
"""

from collections.abc import Iterator

from megazero.plan.activations import (
    bytes_of,
    kept_by_block,
    kept_by_blocks,
    kept_by_layer,
    logits,
    spared_by_layer,
    wide,
)
from megazero.plan.job import Job
from megazero.plan.layers import Layer, Moment, Width, of_job
from megazero.plan.layers import head as head_layers


def of_head(job: Job, parts: range, *, fused: bool) -> Iterator[tuple[int, str]]:
    """Yield (bytes, place) for one micro-batch in the backward of the head, the last of these parts.

    Args:
        fused: operations make no copies of their own.
    """
    kept = kept_by_blocks(job, parts)
    norm, projection = head_layers(job.shape)
    narrow = job.shape.vocab * _narrow(job, 1, job.shape.hidden)
    tokens = job.tokens * (8 + 5 * wide(job.bytes.parameter))
    scores = logits(job) * (1 if job.shape.logit_cap is None else 2)  # with the slope of a cap
    yield kept + 2 * job.stream + scores + tokens + _of_column(job, projection) + narrow, "loss"
    for moment in _shown(norm, fused):
        yield kept + job.stream + _bytes(job, moment), moment.name


def of_block(job: Job, parts: range, *, fused: bool) -> Iterator[tuple[int, str]]:
    """Yield (bytes, place) for one micro-batch in the backward of the block that is the last of these parts."""
    kind = job.shape.kind(parts[-1] - 1)
    whole = job.tokens * job.shape.width * job.bytes.parameter
    kept = kept_by_blocks(job, parts) + (kept_by_block(job, kind) - job.stream if job.recompute == "full" else 0)
    core = [layer for layer in of_job(job, kind) if layer.core] if job.recompute == "selective" else []
    for layer in reversed(of_job(job, kind)):
        kept += job.stream * (layer.name == "out" and job.recompute == "full")  # a replay holds its output's gradient
        if core and layer is core[-1]:  # the whole core runs again, before its first backward
            kept += sum(spared_by_layer(job, each) for each in core)
        replay = bytes_of(job, core[-1].kept, job.bytes.parameter) + whole // job.tensor if layer in core[:-1] else 0
        for moment in _shown(layer, fused):
            yield kept + job.stream + replay + _bytes(job, moment), moment.name
        if layer.product is not None:
            yield kept + job.stream + _of_product(job, layer), layer.name
        kept += bytes_of(job, layer.passed, job.bytes.parameter) - kept_by_layer(job, layer)


def _of_product(job: Job, layer: Layer) -> int:
    """Return the bytes that a product needs in its backward."""
    item = job.bytes.parameter
    if layer.product == "column":
        own = bytes_of(job, Width(split=layer.outputs), item) + _of_column(job, layer)
    else:
        own = bytes_of(job, Width(split=layer.inputs), item) + bytes_of(job, layer.working, item)
        own += job.tokens * layer.outputs * item if job.sequence else 0
    return own + max(_narrow(job, each.rows, each.columns) for each in layer.weights if each.zone == "split")


def _of_column(job: Job, layer: Layer) -> int:
    """Return the bytes of a column product's input gradient; with sequence parallelism also gathered input and sum."""
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
