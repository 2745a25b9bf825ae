"""The cost of each kind of layer: parameters, FLOPs, kept activations, working memory, traffic.

The formulas of this package sum these costs. A dry run and the ledger of a run measure them, for comparison. A new kind
of layer needs one `Layer` here, besides the module in `model/` that computes it.

h is the hidden size, d the size of a head, q the width of all queries, kv that of keys and of values, f the width of
the MLP. A serial block with norms before its branches, in forward order:

    layer        parameters            kept for backward                            moved forward, backward
    norm         h (LayerNorm: 2 h)    its input, h; statistics, 1 (2)              2 h, 3 h
    qkv          (q + 2 kv) h          its input, h
    qk norm      2 d                   its input, q + kv; statistics, 1 a head      2 (q + kv), 3 (q + kv)
    rotary                                                                          2 (q + kv), 2 (q + kv)
    attention                          the projection, q + 2 kv; softmax sums, 1 a head; normed or rotated queries and
                                       keys, q + kv; with documents its output in their order, q
    out          q h                   its input, q                                 the residual sum: 3 h, 2 h
    norm         h (LayerNorm: 2 h)    its input, h; statistics                     2 h, 3 h
    up           f h (gated: 2 f h)    its input, h
    activation                         its input, f (gated: 2 f)                    2 f, 3 f (gated: 3 f, 5 f)
    down         f h                   its input, f                                 the residual sum: 3 h, 2 h

Norms after a branch are further layers of the first kind. In a parallel block one product, of q + f inputs, ends both
branches; its norms have one input, and a shared norm is also the input of `up`. Attention in blocks (windows, soft
caps) keeps no softmax sums.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from megazero.plan.job import Job
from megazero.plan.matrices import Matrix
from megazero.plan.model import Kind, Shape


@dataclass(frozen=True)
class Width:
    """Numbers of elements for each token.

    Attributes:
        stream: in the residual stream's layout: under sequence parallelism a rank holds them for 1/t of the tokens.
        split: split over the tensor ranks.
        whole: on every tensor rank, for all tokens.
    """

    stream: int = 0
    split: int = 0
    whole: int = 0


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
class Weight:
    """A parameter of a layer.

    Attributes:
        name: its name in its block, or its full name outside of blocks.
        rows, columns: over all tensor ranks, as stored.
        zone: `split`: tensor ranks have different rows; `whole`: every one holds it; `partial`: every one holds it and
            uses it on its own heads, so that gradients are summed.
        matrix: the matrices of a weight inside of a block.
    """

    name: str
    rows: int
    columns: int = 1
    zone: Literal["split", "whole", "partial"] = "split"
    matrix: Matrix | None = None

    @property
    def decays(self) -> bool:
        """Return whether the optimizer's weight decay applies to it."""
        return self.columns > 1 and "positions" not in self.name

    @property
    def numel(self) -> int:
        """Return its elements, those of every tensor rank counted once."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Layer:
    """The cost of one layer.

    Attributes:
        name: as plans print it.
        weights: its parameters.
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
        working: elements that its backward holds, besides the gradients of its product.
        passed: elements that are held from the end of its backward on, for layers before it in the block; negative:
            elements that layers after it have passed, and that are freed here.
    """

    name: str
    weights: tuple[Weight, ...] = ()
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
    working: Width = Width()
    passed: Width = Width()

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
        return sum(weight.numel for weight in self.weights)


@cache  # a search asks for equal models thousands of times
def block(
    shape: Shape, kind: Kind, *, tensor: int = 1, documents: bool = False, replays_core: bool = False
) -> tuple[Layer, ...]:
    """Return the layers of one block of a kind, in forward order.

    Args:
        tensor: number of tensor ranks; each attends with a key-value head of its own, or with a copy of one.
        documents: attention does not cross the ends of documents.
        replays_core: selective recompute.
    """
    before, after = shape.norm_place != "post", shape.norm_place != "pre"
    norm, second = ((_norm(shape, "norm", f"{of}_norm"),) * before for of in ("attention", "mlp"))
    post, last = ((_norm(shape, "post norm", f"{of}_post_norm"),) * after for of in ("attention", "mlp"))
    qkv = Weight("attention.qkv.weight", shape.qkv_matrix.rows, shape.hidden, matrix=shape.qkv_matrix)
    attended = replace(shape, kv_heads=max(shape.kv_heads, tensor))
    attention = (_column(shape, "qkv", (qkv,), "attention.qkv.bias"), *_core(attended, kind, documents, ranks=tensor))
    if shape.residual == "serial":
        out, down = (_row(shape, "out", "attention.out"), *post), (_row(shape, "down", "mlp.down"), *last)
        return (*norm, *attention, *out, *second, *_mlp(shape), *down)
    # The gradient of attention's output waits for the MLP's backward, and so does this output where attention keeps it.
    waits = (1 + (not (documents or replays_core or _is_blocked(shape, kind)))) * shape.width
    end = replace(_row(shape, "out and down", "attention.out", "mlp.down"), passed=Width(split=waits))
    attention = (*attention[:-1], replace(attention[-1], passed=Width(split=-waits)))
    up, activation = _mlp(shape)
    if shape.residual == "parallel_shared":  # the norm's output is kept once, and the gradient of `up` waits for qkv's
        up = replace(up, kept=Width(), passed=Width(stream=shape.hidden))
        return (*norm, *attention, up, activation, end)
    (same,) = second  # its input is that of the first
    return (*norm, *attention, replace(same, kept=Width()), up, activation, end)


def head(shape: Shape) -> tuple[Layer, ...]:
    """Return the layers after the last block: the norm and the projection to the vocabulary."""
    own = () if shape.tie_embeddings else (Weight("head.weight", shape.vocab, shape.hidden),)
    norm = _norm(shape, "last norm", "head.norm")
    return norm, Layer("head", own, product="column", inputs=shape.hidden, outputs=shape.vocab)


def parameters(shape: Shape) -> int:
    """Return the parameters of the whole model, each counted once (a tied head is the embedding)."""
    positions = shape.seq_len * shape.hidden if shape.learned_positions else 0
    ends = sum(layer.parameters for layer in head(shape))
    blocks = sum(count * block_parameters(shape, kind) for kind, count in shape.counted().items())
    return shape.vocab * shape.hidden + positions + blocks + ends


def block_parameters(shape: Shape, kind: Kind) -> int:
    """Return the parameters of one block of a kind."""
    return sum(layer.parameters for layer in block(shape, kind))


def of_job(job: Job, kind: Kind) -> tuple[Layer, ...]:
    """Return the layers of one block of a kind, as a job runs it."""
    replays_core = job.recompute == "selective"
    return block(job.shape, kind, tensor=job.tensor, documents=job.mask_eod, replays_core=replays_core)


def products(job: Job) -> tuple[Layer, ...]:
    """Return the layers of a block that have a matrix product; all kinds have equal ones."""
    return tuple(layer for layer in of_job(job, job.shape.kinds[0]) if layer.product is not None)


def _core(shape: Shape, kind: Kind, documents: bool, *, ranks: int) -> tuple[Layer, ...]:
    """Return the layers between the projections of attention, over a number of tensor ranks."""
    q, kv = shape.width, shape.kv_width
    normed, rotated = shape.qk_norm != "none", shape.rope_of(kind) is not None
    core = Layer(
        "attention",
        kept=Width(split=q + 2 * kv),
        spared=Width(split=(q + kv) * (normed or rotated) + q * documents, whole=int(shape.query_scale is not None)),
        statistics=Width(split=0 if _is_blocked(shape, kind) else shape.heads),
        core=True,
        moments=(_blocks_moment(shape, kind),) if _is_blocked(shape, kind) else (),
    )
    moved = Width(split=2 * (q + kv))
    rotary = Layer("rotary", core=True, forward=moved, backward=moved)
    own = [_qk_norms(shape, ranks, rotated and shape.qk_norm_at == "after")] * normed + [rotary] * rotated
    return (*(own if shape.qk_norm_at == "before" else reversed(own)), core)


def _is_blocked(shape: Shape, kind: Kind) -> bool:
    """Return whether attention runs in blocks of queries, of which it keeps only queries, keys and values."""
    return shape.window_of(kind) is not None or shape.attention_cap is not None


def _blocks_moment(shape: Shape, kind: Kind) -> Moment:
    """Return the moment in which attention in blocks computes a block again, with its scores if they are capped."""
    q, kv, s, window = shape.width, shape.kv_width, shape.seq_len, shape.window_of(kind)
    queries = min(s, shape.block_length(window))
    keys = s if window is None else min(s, queries + window - 1)
    scores = -(-shape.heads * queries * keys // s) if shape.attention_cap is not None else 0
    # with a cap, queries of a group have keys and values of their own
    of_block = q * (queries + (1 + (kv < q)) * keys) if scores else 2 * (q * queries + kv * keys)
    return Moment("attention", Width(split=2 * q + of_block // s), wide=Width(split=2 * kv + 4 * scores))


def _qk_norms(shape: Shape, ranks: int, rotated: bool) -> Layer:
    """Return the RMS norms of queries and keys: of each head, or of all, whose statistics tensor ranks sum.

    Those of all heads on several ranks are plain operations, which keep no copies of a rank's only group.

    Args:
        rotated: before they are normed.
    """
    q, kv, heads = shape.width, shape.kv_width, shape.qk_norm == "head"
    copied = heads or rotated or ranks == 1 or shape.kv_heads > ranks
    gradients = q + 2 * kv + q * heads  # of queries, keys and values, and a contiguous copy of one
    wide = Width(split=4 * q if heads else 3 * (q + kv))
    copies = Moment("qk norm", Width(split=gradients), wide=wide, reference=heads)
    names = ("attention.q_norm.weight", "attention.k_norm.weight")
    if heads:
        weights = tuple(Weight(name, shape.head_dim, zone="partial") for name in names)
    else:
        weights = tuple(Weight(name, rows) for name, rows in zip(names, (q, kv), strict=True))
    return Layer(
        "qk norm",
        weights,
        spared=Width(split=(q + kv) * copied),
        statistics=Width(split=shape.heads + shape.kv_heads) if heads else Width(whole=2),
        core=True,
        moments=(copies,) if heads or ranks > 1 else (),
        forward=Width(split=2 * (q + kv)),
        backward=Width(split=3 * (q + kv)),
    )


def _mlp(shape: Shape) -> tuple[Layer, ...]:
    """Return the layers of the MLP but its last product."""
    f, inputs = shape.ffn, shape.num_mlp_inputs
    name = f"{shape.activation} x up" if shape.gated else shape.activation
    moments = [Moment(name, Width(split=(1 + inputs) * f))]  # the incoming gradient and those of the inputs
    if shape.biased("mlp") and not shape.gated:
        plain = shape.activation == "gelu"  # others have no kernel that adds the bias again
        moments.append(Moment(name, Width(split=3 * f), reference=plain))
    activation = Layer(
        name,
        kept=Width(split=inputs * f),
        moments=tuple(moments),
        forward=Width(split=(1 + inputs) * f),
        backward=Width(split=(1 + 2 * inputs) * f),
        kernels=(1, 1),
    )
    names = ("mlp.gate", "mlp.up") if shape.gated else ("mlp.up",)
    weights = tuple(Weight(f"{each}.weight", f, shape.hidden, matrix=Matrix(f, shape.hidden)) for each in names)
    biases = [f"{each}.bias" for each in names] if shape.gated else ["mlp.up_bias"]
    return _column(shape, "up", weights, *biases), activation


def _norm(shape: Shape, name: str, prefix: str) -> Layer:
    """Return a norm of the residual stream; an RMSNorm that is not fused makes four wide copies in backward.

    Args:
        prefix: of the names of its parameters.
    """
    h, statistics, biased = shape.hidden, 2 if shape.layernorm else 1, shape.layernorm and shape.biased("norm")
    own_gradient = name != "post norm" or shape.dropout > 0 or shape.residual_scale != 1  # else the residual stream's
    copies = Moment(name, Width(stream=h * own_gradient), wide=Width(stream=4 * h), reference=True)
    return Layer(
        name,
        tuple(Weight(f"{prefix}.{each}", h, zone="whole") for each in ("weight", "bias")[: 1 + biased]),
        kept=Width(stream=h),
        statistics=Width(stream=statistics),
        moments=() if shape.layernorm else (copies,),
        forward=Width(stream=2 * h),
        backward=Width(stream=3 * h),
        kernels=(1, 2),
    )


def _column(shape: Shape, name: str, weights: tuple[Weight, ...], *biases: str) -> Layer:
    """Return a product from the residual stream.

    Args:
        biases: the names that the biases of the weights have, if there are any.
    """
    rows = [weight.rows for weight in weights]
    has_bias = shape.biased("qkv" if name == "qkv" else "mlp")
    own = tuple(Weight(bias, each) for bias, each in zip(biases, rows, strict=True)) if has_bias else ()
    read = Width(split=sum(rows) if has_bias else 0)
    h, outputs = shape.hidden, sum(rows)
    return Layer(name, weights + own, product="column", inputs=h, outputs=outputs, kept=Width(h), biases=read)


def _row(shape: Shape, name: str, *prefixes: str) -> Layer:
    """Return a product, or the sum of two, back to the residual stream, with dropout, scale and the residual sum.

    Args:
        prefixes: of the names of its parameters.
    """
    h, dropped, scaled = shape.hidden, shape.dropout > 0, shape.residual_scale != 1
    weights, biased = [], 0
    for prefix in prefixes:
        of_attention = prefix == "attention.out"
        rows = shape.width if of_attention else shape.ffn
        weights.append(Weight(f"{prefix}.weight", rows, h, matrix=Matrix(rows, h, inputs_first=True)))
        if shape.biased("out" if of_attention else "mlp"):
            weights.append(Weight(f"{prefix}.bias", h, zone="whole"))
            biased += 1
    inputs = sum(weight.rows for weight in weights if weight.matrix is not None)
    mask = Moment("mask", words=Width(stream=2 * h), reference=True)  # the hash of a mask
    copies = (dropped or scaled) + (shape.norm_place != "pre")  # of the branch's gradient
    return Layer(
        name,
        tuple(weights),
        product="row",
        inputs=inputs,
        outputs=h,
        kept=Width(split=inputs),
        moments=(mask,) if dropped else (),
        forward=Width(stream=(5 if scaled else 3) * h),
        backward=Width(stream=(4 if scaled else 2) * h),
        masks=h if dropped else 0,
        kernels=(1 + scaled, 1 + scaled),
        biases=Width(stream=biased * h),
        working=Width(stream=copies * h),
    )
