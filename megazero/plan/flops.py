"""The arithmetic of a model: FLOPs of a token, of its blocks and of their attention."""

from megazero.plan.model import Kind, Shape


def matmul_parameters(shape: Shape) -> int:
    """Return the parameters that take part in matrix products: the blocks' and the head."""
    return shape.layers * block_matrices(shape) + shape.vocab * shape.hidden


def block_matrices(shape: Shape) -> int:
    """Return the parameters of a block's matrices: queries and output, keys and values, the MLP; equal in all kinds."""
    return shape.hidden * (2 * (shape.width + shape.kv_width) + (1 + shape.num_mlp_inputs) * shape.ffn)


def flops_per_token(shape: Shape) -> int:
    """Return the model FLOPs of one training token, forward and backward, in a sequence of seq_len tokens.

    A product by a matrix of n elements costs 2 n FLOPs per token forward and twice that backward; the two products of
    attention, scores and values, cost 2 s x width each. So one training token costs

        6 N + 12 L heads head_dim s            Chowdhery et al. 2022 (PaLM), arXiv 2204.02311, appendix B

    where N counts the parameters that take part in matrix products: the head once, tied or not, the lookup never. For
    the GPT choices a batch of B sequences then costs 72 B L s h^2 (1 + s / (6 h) + V / (12 h L)), the *model FLOPs* of
    Korthikanti et al. 2022, arXiv 2205.05198, appendix A. Both papers count causal attention in full, and so do we;
    recompute is not counted: it is work the machine does, not work the model needs (MFU, not HFU).
    """
    return 6 * matmul_parameters(shape) + 3 * all_attention_flops(shape)


def attention_flops(shape: Shape, kind: Kind) -> int:
    """Return the forward FLOPs of one token in the scores and values of one block, causal attention in full.

    In full means both halves of the square that the causal mask cuts. A window of w tokens leaves w (2 s - w) of its
    s^2 scores.
    """
    s = shape.seq_len
    window = min(kind.window or s, s)
    return 4 * (window * (2 * s - window) // s) * shape.heads * shape.head_dim


def all_attention_flops(shape: Shape) -> int:
    """Return the forward FLOPs of one token in the scores and values of all blocks."""
    return sum(count * attention_flops(shape, kind) for kind, count in shape.counted().items())


def block_costs(shape: Shape) -> tuple[tuple[float, ...], float]:
    """Return (the FLOPs of each block, those of the output projection), divided by those of the first block.

    They are in the same proportion in forward and in backward.
    """
    first, *_ = each = [2 * block_matrices(shape) + attention_flops(shape, kind) for kind in shape.kinds]
    return tuple(each[i % len(each)] / first for i in range(shape.layers)), 2 * shape.vocab * shape.hidden / first
