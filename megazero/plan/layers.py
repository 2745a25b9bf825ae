"""The cost of each kind of layer: parameters, FLOPs, kept activations, working memory, traffic.

The formulas of this package sum these costs. A dry run and the ledger of a run measure them, for comparison. A new kind
of layer needs one `Layer` here, besides the module in `model/` that computes it.

h is the hidden size, d the size of a head, kv the width of keys and of values, f the width of the MLP. A block, in
forward order:

    layer        parameters            kept for backward                            moved forward, backward
    norm         h (LayerNorm: 2 h)    its input, h; statistics, 1 (2)              2 h, 3 h
    qkv          (h + 2 kv) h          its input, h
    qk norm      2 d                   its input, h + kv; statistics, 1 a head      2 (h + kv), 3 (h + kv)
    rotary                                                                          2 (h + kv), 2 (h + kv)
    attention                          the projection, h + 2 kv; softmax sums, 1 a head; normed or rotated queries and
                                       keys, h + kv; with documents its output in their order, h
    out          h h                   its input, h                                 the residual sum: 3 h, 2 h
    norm         h (LayerNorm: 2 h)    its input, h; statistics                     2 h, 3 h
    up           f h (gated: 2 f h)    its input, h
    gelu         (gated: silu x up)    its input, f (gated: 2 f)                    2 f, 3 f (gated: 3 f, 5 f)
    down         h f                   its input, f                                 the residual sum: 3 h, 2 h

With LayerNorm, products have biases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megazero.plan.model import Shape


@dataclass(frozen=True)
class Width:
    """Numbers of elements for each token.

    Attributes:
        stream: in the residual stream's layout: under sequence parallelism a rank holds them for 1/t of the tokens.
        split: split over the tensor ranks.
    """

    stream: int = 0
    split: int = 0


@dataclass(frozen=True)
class Moment:
    """A moment in a layer's backward: its memory on top of kept activations and the residual stream's gradient.

    Attributes:
        name: as plans print it.
        values: elements in the dtype of activations.
        wide: elements in fp32, or in the dtype of activations if that is wider.
        words: elements of 4 bytes.
        reference: only kernels that are not fused need this memory.
    """

    name: str
    values: Width = Width()
    wide: Width = Width()
    words: Width = Width()
    reference: bool = False


@dataclass(frozen=True)
class Layer:
    """The cost of one layer.

    Attributes:
        name: as plans print it.
        split: rows and columns of each parameter whose rows are split over the tensor ranks.
        whole: elements of each parameter that every tensor rank holds.
        partial: elements of each that every tensor rank holds and uses on its own heads, so that gradients are summed.
        product: its matrix product from `inputs` to `outputs` numbers a token: `column` splits outputs over tensor
            ranks, `row` inputs; both communicate the residual stream over the tensor axis. None: no product.
        kept: elements kept for backward, in the dtype of activations.
        spared: elements kept for backward too, but not with selective recompute.
        statistics: elements kept for backward in fp32, or in the dtype of activations if that is wider.
        core: the layer is between the projections of attention: selective recompute runs it again, and does not keep
            its statistics.
        moments: moments of its backward that may be the peak of a step; `peak.py` adds those of products.
        forward, backward: elements read and written, without those of products and attention.
        masks: bytes of dropout masks read and written, for each token of the residual stream.
        kernels: kernel launches for `forward` and `masks`, and for `backward` and `masks`.
        biases: elements read to sum the gradients of biases.
    """

    name: str
    split: tuple[tuple[int, int], ...] = ()
    whole: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    product: Literal["column", "row"] | None = None
    inputs: int = 0
    outputs: int = 0
    kept: Width = Width()
    spared: Width = Width()
    statistics: Width = Width()
    core: bool = False
    moments: tuple[Moment, ...] = ()
    forward: Width = Width()
    backward: Width = Width()
    masks: int = 0
    kernels: tuple[int, int] = (0, 0)
    biases: Width = Width()

    @property
    def matrix(self) -> int:
        """Return the number of parameters in the matrix product."""
        return self.inputs * self.outputs

    @property
    def split_width(self) -> int:
        """Return the width of the product's side that tensor ranks split: outputs (column) or inputs (row)."""
        return self.outputs if self.product == "column" else self.inputs

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters; those that every tensor rank holds count once."""
        return sum(rows * columns for rows, columns in self.split) + sum(self.whole + self.partial)


@cache  # a search asks for equal models thousands of times
def block(shape: Shape, *, documents: bool = False) -> tuple[Layer, ...]:
    """Return the layers of one block, in forward order.

    Args:
        documents: attention does not cross the ends of documents.
    """
    return (*_attention(shape, documents), *_mlp(shape))


def head(shape: Shape) -> tuple[Layer, ...]:
    """Return the layers after the last block: the norm and the projection to the vocabulary."""
    split = () if shape.tie_embeddings else ((shape.vocab, shape.hidden),)
    norm = _norm(shape, "last norm")
    return norm, Layer("head", split, product="column", inputs=shape.hidden, outputs=shape.vocab)


def parameters(shape: Shape) -> int:
    """Return the parameters of the whole model, each counted once (a tied head is the embedding)."""
    positions = shape.seq_len * shape.hidden if shape.learned_positions else 0
    ends = sum(layer.parameters for layer in head(shape))
    return shape.vocab * shape.hidden + positions + shape.layers * block_parameters(shape) + ends


def block_parameters(shape: Shape) -> int:
    """Return the parameters of one block."""
    return sum(layer.parameters for layer in block(shape))


def matmul_parameters(shape: Shape) -> int:
    """Return the parameters that take part in matrix products: the blocks' and the head."""
    return shape.layers * _matrices(block(shape)) + _matrices(head(shape))


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
    return 6 * matmul_parameters(shape) + 3 * shape.layers * attention_flops(shape)


def attention_flops(shape: Shape) -> int:
    """Return the forward FLOPs of one token in the scores and values of one block, causal attention in full."""
    return 4 * shape.seq_len * shape.heads * shape.head_dim


def head_in_blocks(shape: Shape) -> float:
    """Return the FLOPs of the output projection divided by a block's (equal in forward and backward)."""
    return 2 * _matrices(head(shape)) / (2 * _matrices(block(shape)) + attention_flops(shape))


def _matrices(layers: Sequence[Layer]) -> int:
    return sum(layer.matrix for layer in layers)


def _attention(shape: Shape, documents: bool) -> tuple[Layer, ...]:
    h, kv = shape.hidden, shape.kv_width
    normed, rotated = shape.qk_norm == "head", not shape.learned_positions
    core = Layer(
        "attention",
        kept=Width(split=h + 2 * kv),
        spared=Width(split=(h + kv) * (normed or rotated) + h * documents),
        statistics=Width(split=shape.heads),
        core=True,
    )
    own = (_head_norms(shape),) * normed + (_rotary(shape),) * rotated
    return _norm(shape, "norm"), _column(shape, "qkv", (h + 2 * kv,)), *own, core, _row(shape, "out", h)


def _rotary(shape: Shape) -> Layer:
    passed = Width(split=2 * (shape.hidden + shape.kv_width))
    return Layer("rotary", core=True, forward=passed, backward=passed)


def _head_norms(shape: Shape) -> Layer:
    """Return the RMS norms of queries and keys."""
    width = shape.hidden + shape.kv_width
    gradients = width + shape.kv_width + shape.hidden  # of queries, keys and values, and a contiguous copy of one
    copies = Moment("qk norm", Width(split=gradients), wide=Width(split=4 * shape.hidden), reference=True)
    return Layer(
        "qk norm",
        partial=(shape.head_dim, shape.head_dim),
        spared=Width(split=width),
        statistics=Width(split=shape.heads + shape.kv_heads),
        core=True,
        moments=(copies,),
        forward=Width(split=2 * width),
        backward=Width(split=3 * width),
    )


def _mlp(shape: Shape) -> tuple[Layer, ...]:
    f, inputs = shape.ffn, shape.num_mlp_inputs
    name = "silu x up" if shape.gated else "gelu"
    moments = [Moment(name, Width(split=(1 + inputs) * f))]  # the incoming gradient and those of the inputs
    if shape.layernorm and not shape.gated:
        moments.append(Moment(name, Width(split=3 * f), reference=True))  # adds the bias again
    activation = Layer(
        name,
        kept=Width(split=inputs * f),
        moments=tuple(moments),
        forward=Width(split=(1 + inputs) * f),
        backward=Width(split=(1 + 2 * inputs) * f),
        kernels=(1, 1),
    )
    return _norm(shape, "norm"), _column(shape, "up", (f,) * inputs), activation, _row(shape, "down", f)


def _norm(shape: Shape, name: str) -> Layer:
    """Return a norm of the residual stream; an RMSNorm that is not fused makes four wide copies in backward."""
    h, parameters = shape.hidden, 2 if shape.layernorm else 1
    copies = Moment(name, Width(stream=h), wide=Width(stream=4 * h), reference=True)
    return Layer(
        name,
        whole=(h,) * parameters,
        kept=Width(stream=h),
        statistics=Width(stream=parameters),
        moments=() if shape.layernorm else (copies,),
        forward=Width(stream=2 * h),
        backward=Width(stream=3 * h),
        kernels=(1, 2),
    )


def _column(shape: Shape, name: str, rows: tuple[int, ...]) -> Layer:
    """Return a product from the residual stream, with one weight of `rows[i]` rows for each i."""
    h, biased = shape.hidden, shape.layernorm
    split = (*((each, h) for each in rows), *((each, 1) for each in rows if biased))
    biases = Width(split=sum(rows) if biased else 0)
    return Layer(name, split, product="column", inputs=h, outputs=sum(rows), kept=Width(h), biases=biases)


def _row(shape: Shape, name: str, inputs: int) -> Layer:
    """Return a product back to the residual stream, with dropout and the residual sum."""
    h, dropped, biased = shape.hidden, shape.dropout > 0, shape.layernorm
    mask = Moment("mask", words=Width(stream=2 * h), reference=True)  # the hash of a mask
    return Layer(
        name,
        ((inputs, h),),
        (h,) * biased,
        product="row",
        inputs=inputs,
        outputs=h,
        kept=Width(split=inputs),
        moments=(mask,) if dropped else (),
        forward=Width(stream=3 * h),
        backward=Width(stream=2 * h),
        masks=h if dropped else 0,
        kernels=(1, 1),
        biases=Width(stream=h if biased else 0),
    )
