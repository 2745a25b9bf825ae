"""The most that a step's activations and their gradients take on one rank, beside what it holds all the time.

Forward only adds to what is kept, so the most is there in a backward, right after the forward of the micro-batch that
is the last to be live: in the head, or in the last block of the stage, whose moments are walked through here. Sizes as
in `activations.py`; with n = T' h e of the residual stream, N = T h e of the whole sequence (the same without sequence
parallelism), f = T ffn e / t, and K what the block keeps, in bytes beside what the other blocks keep:

    loss             2 n + V + N        the last norm's input and output, logits (their gradient takes their place),
                                        and the gradient of what they were made from; with sequence parallelism
                                        twice N, because the norm's output is gathered for the weight's gradient
    down             K + n + f          the gradient that comes in, and that of the product's input
    gelu             K + n + f          what gelu returned is gone; its gradient and that of its input (+ f: the
                                        reference adds the bias anew)
    silu x up        K + n + 2 f        gated: what was returned is gone; three gradients
    up               K + n - f + N      both sides of gelu are gone; the gradient of the norm's output (2 N as above)

With full recompute K is what the replayed block keeps, less its input, which lies in the arena.
"""

from collections.abc import Iterator

from megazero.plan.activations import Micro, kept_by_block
from megazero.plan.model import ModelShape


def moments(
    shape: ModelShape, micro: Micro, blocks: int, recompute: str, *, head: bool, fused: bool
) -> Iterator[tuple[str, int]]:
    """(where in backward, bytes) of one micro-batch on a stage.

    Args:
        blocks: on this stage.
        head: the stage has the head too.
        fused: gelu's backward makes no second copy of its input.
    """
    tokens, t, item = shape.seq_len * micro.sequences, micro.tensor, micro.item
    whole = tokens * shape.hidden * item
    stream = whole // t if micro.sequence else whole
    gathered = whole if micro.sequence else 0
    ffn = tokens * shape.ffn * item // t
    each = kept_by_block(shape, micro, recompute) if recompute != "full" else 0
    kept = blocks * each
    if head:
        logits = tokens * -(-shape.vocab // t) * item
        yield "loss", kept + 2 * stream + logits + whole + gathered
    if not blocks:
        return
    kept += kept_by_block(shape, micro, "none") - stream if recompute == "full" else 0
    dropped = 2 * stream if micro.dropout else 0
    yield "down", kept + stream + ffn + max(dropped, dropped // 2 + gathered)
    if shape.gated:
        yield "silu x up", kept + stream + 2 * ffn
        yield "up", kept - 2 * ffn + stream + whole + gathered
    else:
        yield "gelu", kept + stream + ffn * (1 if fused else 2)
        yield "up", kept - ffn + stream + whole + gathered


def peak(shape: ModelShape, micro: Micro, blocks: int, recompute: str, *, head: bool, fused: bool) -> tuple[int, str]:
    """The most of these, and where."""
    return max((size, where) for where, size in moments(shape, micro, blocks, recompute, head=head, fused=fused))
