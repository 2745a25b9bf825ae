"""The bytes that layers keep for their backward, in closed form, from what each of them says (`layers.py`).

T tokens of a micro-batch (sequence x micro-batch), t tensor ranks, T' = T / t under sequence parallelism and T without,
e bytes an element: T' e for each number of the residual stream, T e / t for each of those that tensor ranks split, 4
bytes (8 in fp64) for each of a statistic.

In 16 bits a block of GPT-2 with f = 4 h and t = 1 keeps s b h (8 + 6 + 2 + 16) = 32 s b h. Korthikanti et al. 2022
(arXiv 2205.05198, Table 2) count 34: two masks of dropout, a byte an element, which are not stored here, because they
are computed again. Their 5 a s^2 b for scores is what fused attention never stores. Selective recompute spares the
softmax sums, and what documents and rotary add; full recompute keeps T' h e, the input, or with Pa T' h e / t.
"""

from megazero.plan.job import Job
from megazero.plan.layers import Layer, Width


def kept_by_block(job: Job, recompute: str = "none") -> int:
    """Return the bytes that one block keeps of one micro-batch, with `memory.recompute` and the job's Pa."""
    if recompute == "full":
        return job.stream // (job.tensor if job.partition and not job.sequence else 1)
    spared = sum(spared_by_layer(job, layer) for layer in job.block) if recompute == "selective" else 0
    return sum(kept_by_layer(job, layer) for layer in job.block) - spared


def kept_by_layer(job: Job, layer: Layer) -> int:
    """Return the bytes that a layer keeps of one micro-batch."""
    item = job.bytes.parameter
    values = bytes_of(job, layer.kept, item) + bytes_of(job, layer.spared, item)
    return values + bytes_of(job, layer.statistics, wide(item))


def spared_by_layer(job: Job, layer: Layer) -> int:
    """Return the bytes of those that selective recompute does not keep."""
    item = job.bytes.parameter
    return bytes_of(job, layer.spared, item) + bytes_of(job, layer.statistics, wide(item)) if layer.core else 0


def bytes_of(job: Job, width: Width, item: int) -> int:
    """Return the bytes of some numbers of `item` bytes for each token of a micro-batch, on one rank."""
    return (job.local(job.tokens) * width.stream + job.tokens * width.split // job.tensor) * item


def wide(item: int) -> int:
    """Return the bytes of an element of a tensor that is computed in a wider type."""
    return max(item, 4)


def logits(job: Job) -> int:
    """Return the bytes of the logits of one micro-batch, of this rank's part of the vocabulary."""
    return job.tokens * -(-job.shape.vocab // job.tensor) * job.bytes.parameter
