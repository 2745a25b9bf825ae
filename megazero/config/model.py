"""Define the config's section `model`: the options that select and mix the features of today's dense models."""

from typing import Annotated, Literal

from pydantic import Field

from megazero.config.sections import Above0, Decay, Layers, Name, NonNegative, Positive, Section, Tokens, option

Share = Annotated[float, Field(gt=0, le=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
AtLeast1 = Annotated[float, Field(ge=1)]


class Rope(Section):
    """Rotary positions of a kind of block: kinds of frequencies and their factors (model/rotary.py)."""

    theta: AtLeast1 | None = option(None, "Base of the angles; null: model.rope_theta.")
    share: Share = option(1.0, "Share of a head's channels that turn.")
    kind: Literal["plain", "linear", "ntk", "llama3", "yarn", "longrope"] = option("plain", "Kind of frequencies.")
    factor: AtLeast1 | None = option(None, "Factor by which texts are longer: linear, llama3, yarn, longrope.")
    original: Positive | None = option(None, "Sequence length before the extension: llama3, yarn, longrope.")
    low: Above0 | None = option(None, "llama3: wavelengths over original / low are divided by factor; null: 1.")
    high: Above0 | None = option(None, "llama3: wavelengths under original / high stay; null: 4.")
    beta_fast: Above0 | None = option(None, "yarn: pairs that turn more often in `original` positions stay; null: 32.")
    beta_slow: Above0 | None = option(None, "yarn: frequencies of pairs that turn less are divided; null: 1.")
    attention_factor: Above0 | None = option(None, "yarn, longrope: factor of cos and sin; null: from factor.")
    mscale: Above0 | None = option(None, "yarn: weight of the attention factor's logarithm.")
    mscale_all: Above0 | None = option(None, "yarn: the same in its denominator.")
    truncate: bool | None = option(None, "yarn: round the limits of its ramp to whole pairs; null: true.")
    short: tuple[Above0, ...] | None = option(None, "longrope: a divisor for each pair that turns.")
    long: tuple[Above0, ...] | None = option(None, "longrope: the same for seq_len > original.")
    alpha: AtLeast1 | None = option(None, "ntk: factor of theta, to the power dim / (dim - 2).")


class LayerKind(Section):
    """A kind of block; the blocks of a kind have all that distinguishes them in common."""

    window: Positive | None = option(None, "Tokens that a token attends to, itself included; null: all before it.")
    rope: Rope | None = option(Rope(), "Rotary positions; null: none (NoPE). No effect with learned positions.")


class Bias(Section):
    qkv: bool | None = option(None, "Biases of queries, keys and values; null: with layernorm.")
    out: bool | None = option(None, "Biases of attention's output projection; null: with layernorm.")
    mlp: bool | None = option(None, "Biases of the MLP; null: with layernorm.")


class Softcap(Section):
    attention: Above0 | None = option(None, "c: attention scores become c tanh(score / c); null: no cap.")
    logits: Above0 | None = option(None, "c: logits become c tanh(logit / c); null: no cap.")


class QueryScale(Section):
    """Queries at position p are multiplied by 1 + beta ln(1 + floor(p / original)) (Ministral 3)."""

    beta: Above0
    original: Positive


class Model(Section):
    layers: Layers = option(12, "Transformer blocks, L.")
    hidden: Positive = option(768, "Hidden size, h.")
    heads: Positive = option(12, "Query heads, a.")
    kv_heads: Positive | None = option(None, "Key-value heads (grouped queries); null: heads.")
    head_dim: Positive | None = option(None, "Channels of a head; null: hidden / heads.")
    ffn: Positive | None = option(
        None, "Feed-forward size; null: 4 * hidden; if gated 8/3 * hidden, rounded up to a multiple of 256."
    )
    vocab: Positive = option(50257, "Vocabulary size, V.")
    seq_len: Tokens = option(1024, "Sequence length in tokens, s.")
    position: Literal["learned", "rotary"] = option("learned", "Position embedding.")
    norm: Literal["layernorm", "rmsnorm"] = option("layernorm", "Kind of norm.")
    norm_place: Literal["pre", "post", "sandwich"] = option(
        "pre", "Norm before each branch of a block, after it (before the sum), or both."
    )
    norm_bias: bool | None = option(None, "Biases of layernorms; null: true.")
    norm_offset: Literal[0, 1] = option(0, "The factor of a norm is offset + its weight.")
    norm_cast: Literal["before", "after"] = option("before", "rmsnorm in 16 bits: round before or after the weight.")
    norm_eps: Above0 = option(1e-5, "Added to the variance in norms.")
    residual: Literal["serial", "parallel", "parallel_shared"] = option(
        "serial", "Attention, then the MLP; or both from the same input, each with its norm or with a shared one."
    )
    activation: Literal["gelu", "gelu_erf", "relu2", "swiglu", "geglu"] = option(
        "gelu", "gelu and geglu: tanh form; swiglu and geglu: gated."
    )
    dropout: Decay = option(0.0, "Dropout of embeddings and residuals, not of attention.")
    tie_embeddings: bool = option(True, "Share one weight between token embedding and output.")
    bias: Bias = Bias()
    rope_theta: AtLeast1 = option(10000.0, "Base of the rotary angles.")
    layer_kinds: Annotated[dict[Name, LayerKind], Field(min_length=1, max_length=100)] | None = option(
        None, "Kinds of blocks by name: {NAME: {window, rope}}; null: one kind, without a window."
    )
    layer_pattern: Annotated[tuple[Name, ...], Field(min_length=1, max_length=4096)] | None = option(
        None, "Names of the kinds of the first blocks, then repeated; null: each kind once, in their order."
    )
    qk_norm: Literal["none", "head", "full"] = option(
        "none", "RMS norm of queries and keys: of each head, or of all heads together (full)."
    )
    qk_norm_at: Literal["before", "after"] = option("before", "Norm queries and keys before or after their rotation.")
    attention_scale: Above0 | None = option(None, "Factor of attention scores; null: head_dim ** -0.5.")
    query_scale: QueryScale | None = option(None, "Scale queries by position: {beta, original}; null: no.")
    embedding_scale: Above0 = option(1.0, "Factor of embedded tokens.")
    residual_scale: Above0 = option(1.0, "Factor of a branch before it is added to the residual stream.")
    logit_scale: Above0 = option(1.0, "Factor of logits.")
    softcap: Softcap = Softcap()
    init_std: Above0 = option(0.02, "Standard deviation of initial weights.")
    init_depth: bool = option(True, "Divide that of each block's output projections by (2 * layers) ** 0.5 (GPT-2).")
    z_loss: AtLeast0 = option(0.0, "Weight of log(Z)^2 in the training loss, Z the sum of exp(logits).")
    loss_chunk: NonNegative | None = option(None, "Tokens whose logits exist at a time; 0: all; null: all if they fit.")
