"""The most that a step's activations and their gradients take on one rank, beside what it holds all the time.

Forward only adds to what is kept, so the most is there in a backward, right after the forward of the micro-batch that
is the last to be live: in the head, or in the last block of the stage, whose moments are walked through here. Sizes as
in `activations.py`; with n = T' h e of the residual stream, N = T h e of the whole sequence, f = T ffn e / t, w = T' h
elements of fp32 or wider, and K what a block keeps, in bytes beside what the other blocks keep:

    loss         2 n + V + N         the last norm's input and output, the logits (their gradient takes their place),
                                     the gradient of what they were made from; with sequence parallelism N + n more:
                                     the norm's output gathered for the weight's gradient, what comes of the sum
    last norm    2 n + 4 w           RMSNorm, not fused: input and incoming gradient, four steps of its backward
    mask         K + n + 8 T' h      dropout, not fused: the gradient that comes in, and the hash behind a mask, two
                                     integers of 4 bytes
    down         K + n + f           the gradient that comes in, and that of the product's input (with dropout n more,
                                     with sequence parallelism N more, the gradient gathered)
    gelu         K + n + f           what gelu returned is gone; its gradient and that of its input (with a bias the
                                     reference adds that anew: + f)
    silu x up    K + n + 2 f         gated: what was returned is gone; three gradients
    up           K + n - f + N       both sides of gelu are gone; the gradient of the norm's output (with sequence
                                     parallelism N + n more as above)
    norm         K - 2 f + n + 4 w   RMSNorm, not fused: as above; what the block's MLP kept is gone (3 f gated)

Where gradients are wider than parameters, a weight's gradient is made in the narrow type first: loss, down and up have
a matrix more. With full recompute K is what the replayed block keeps, less its input, which lies in
the arena.
"""

from collections.abc import Iterator

from megazero.plan.activations import kept_by_block, logits
from megazero.plan.job import Job


def moments(job: Job, blocks: int, *, head: bool, fused: bool) -> Iterator[tuple[int, str]]:
    """Yield (bytes, where in backward) of one micro-batch on a stage; the largest is its peak.

    Args:
        blocks: their number on this stage.
        head: the stage has it too.
        fused: operations make no copies of their own.
    """
    shape, t, item = job.shape, job.tensor, job.bytes.parameter
    stream, whole = job.stream, job.tokens * shape.hidden * item
    gathered, scattered = (whole, stream) if job.sequence else (0, 0)
    wide = 4 * stream * max(item, 4) // item
    ffn = job.tokens * shape.ffn * item // t
    kept = blocks * kept_by_block(job, job.recompute) if job.recompute != "full" else 0
    matrix = shape.hidden * item // t if job.bytes.gradient > item else 0  # a row of a gradient in the narrow type
    if head:
        yield kept + 2 * stream + logits(job) + whole + gathered + scattered + shape.vocab * matrix, "loss"
        if not shape.layernorm and not fused:
            yield kept + 2 * stream + wide, "last norm"
    if not blocks:
        return
    kept += kept_by_block(job) - stream if job.recompute == "full" else 0
    if shape.dropout and not fused:
        yield kept + stream + 8 * stream // item, "mask"
    yield kept + stream + ffn + gathered + (stream if shape.dropout else 0) + shape.ffn * matrix, "down"
    if shape.gated:
        yield kept + stream + 2 * ffn, "silu x up"
    else:
        yield kept + stream + ffn * (1 if fused or not shape.layernorm else 2), "gelu"
    both = (3 if shape.gated else 2) * ffn
    after = kept - both + stream
    yield after + shape.num_mlp_inputs * ffn + whole + gathered + scattered + shape.ffn * matrix, "up"
    if not shape.layernorm and not fused:
        yield after + wide, "norm"
