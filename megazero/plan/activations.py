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
from megazero.plan.layers import Layer, Width, of_job
from megazero.plan.model import Kind


def kept_by_blocks(job: Job, parts: range) -> int:
    """Return the bytes that the blocks among these parts keep for one micro-batch under the job's recompute.

    Inputs of full recompute are not among them (`kept_input`).
    """
    if job.recompute == "full":
        return 0
    selective = job.recompute == "selective"
    return sum(count * kept_by_block(job, kind, selective=selective) for kind, count in job.kinds(parts).items())


def kept_by_block(job: Job, kind: Kind, *, selective: bool = False) -> int:
    """Return the bytes that one block of a kind keeps for one micro-batch, with or without selective recompute."""
    layers = of_job(job, kind)
    spared = sum(spared_by_layer(job, layer) for layer in layers) if selective else 0
    return sum(kept_by_layer(job, layer) for layer in layers) - spared


def kept_input(job: Job) -> int:
    """Return the bytes of a block's input that full recompute keeps for one micro-batch, with Pa if the job has it."""
    return job.stream // (job.tensor if job.partition and not job.sequence else 1)


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
    of_rank = job.local(job.tokens) * width.stream + job.tokens * width.split // job.tensor
    return (of_rank + job.tokens * width.whole) * item


def wide(item: int) -> int:
    """Return the bytes of an element in fp32, or in the dtype of `item` bytes if that is wider."""
    return max(item, 4)


def kept_logits(job: Job) -> int:
    """Return the bytes of the logits that are kept for backward; with a cap backward computes them again."""
    return 0 if job.shape.logit_cap is not None else logits(job)


def logits(job: Job) -> int:
    """Return the bytes of the logits that exist at a time, for this rank's part of the vocabulary."""
    return job.scored * -(-job.shape.vocab // job.tensor) * job.bytes.parameter
