"""Count the bytes that layers keep for backward, in closed form, from the widths that `layers.py` gives each layer.

A micro-batch has T tokens (sequence x micro-batch); t is the number of tensor ranks, T' = T / t under sequence
parallelism and T without, and e the bytes of an element. A layer keeps T' e bytes for each number of the residual
stream and T e / t for each number that tensor ranks split; for statistics e is 4 bytes (8 in fp64).

In 16 bits a block of GPT-2 with f = 4 h and t = 1 keeps s b h (8 + 6 + 2 + 16) = 32 s b h. Korthikanti et al. 2022
(arXiv 2205.05198, Table 2) count 34: they store two dropout masks, a byte an element, which are computed again here.
Fused attention never stores the scores, their 5 a s^2 b. Selective recompute does not keep the softmax sums and what
documents and rotary add. Full recompute keeps only the block's input, T' h e, or T' h e / t with Pa.
"""

from megazero.plan.job import Job
from megazero.plan.layers import Layer, Width


def kept_by_block(job: Job, recompute: str = "none") -> int:
    """Return the bytes that one block keeps for one micro-batch under `recompute`, with Pa if the job has it."""
    if recompute == "full":
        return job.stream // (job.tensor if job.partition and not job.sequence else 1)
    spared = sum(spared_by_layer(job, layer) for layer in job.block) if recompute == "selective" else 0
    return sum(kept_by_layer(job, layer) for layer in job.block) - spared


def kept_by_layer(job: Job, layer: Layer) -> int:
    """Return the bytes that a layer keeps for one micro-batch."""
    item = job.bytes.parameter
    values = bytes_of(job, layer.kept, item) + bytes_of(job, layer.spared, item)
    return values + bytes_of(job, layer.statistics, wide(item))


def spared_by_layer(job: Job, layer: Layer) -> int:
    """Return the bytes of one micro-batch that a layer keeps for backward, and that selective recompute frees."""
    item = job.bytes.parameter
    return bytes_of(job, layer.spared, item) + bytes_of(job, layer.statistics, wide(item)) if layer.core else 0


def bytes_of(job: Job, width: Width, item: int) -> int:
    """Return the bytes on one rank of `width` elements for each token of a micro-batch, `item` bytes each."""
    return (job.local(job.tokens) * width.stream + job.tokens * width.split // job.tensor) * item


def wide(item: int) -> int:
    """Return the bytes of an element in fp32, or in the dtype of `item` bytes if that is wider."""
    return max(item, 4)


def logits(job: Job) -> int:
    """Return the bytes of the logits that exist at a time, for this rank's part of the vocabulary."""
    return job.scored * -(-job.shape.vocab // job.tensor) * job.bytes.parameter
