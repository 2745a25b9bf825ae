"""The model of every config in plain torch, for the certificate's reference: initial weights and token losses in fp64.

It imports nothing of `model/` and is written from the papers and from the options' texts, a line each where possible;
attention has its [S, S] scores. Names of weights are ours, which checkpoints have too.

Shapes: B samples, S sequence, D hidden, G key-value heads, Q query heads of each, d head dim.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.config.schema import Config
from megazero.kernels import counter

_GATED = ("swiglu", "geglu")
_ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {  # of the gated or only input, and of `up`
        "gelu": lambda x, _: F.gelu(x, approximate="tanh"),
        "gelu_erf": lambda x, _: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
        "relu2": lambda x, _: F.relu(x) ** 2,
        "swiglu": lambda x, up: F.silu(x) * up,
        "geglu": lambda x, up: F.gelu(x, approximate="tanh") * up,
    }
)


class Text(NamedTuple):
    """Samples: ids [B]; tokens, targets, validity and positions in documents [B, S]; attention mask [B, S, S]."""

    ids: Tensor
    tokens: Tensor
    targets: Tensor
    valid: Tensor
    positions: Tensor
    sees: Tensor


def initial(config: Config) -> dict[str, Tensor]:
    """Return the initial weights in fp64: normal matrices, ones for norms, zeros for biases."""
    m, found = config.model, {}
    for name, shape in _shapes(m):
        if len(shape) == 1:
            found[name] = torch.full(shape, 1.0 - m.norm_offset if "norm.weight" in name else 0.0).double()
            continue
        std = m.init_std
        if m.init_depth and name.endswith(("attention.out.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * m.layers)
        found[name] = (counter.normal(config.run.seed, name, 0, math.prod(shape)) * std).view(shape)
    return found


def losses(w: Mapping[str, Tensor], m: Any, text: Text, dropped: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Return -log softmax(logits)[target], [B, S].

    Args:
        m: the config's section `model`, resolved.
        dropped: (x, layer, site) -> x with dropout.
    """

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in w:
            return x
        weight = m.norm_offset + w[f"{name}.weight"]
        if m.norm == "layernorm":
            return F.layer_norm(x, (m.hidden,), weight, w.get(f"{name}.bias"), m.norm_eps)
        return F.rms_norm(x, (m.hidden,), weight, m.norm_eps)

    def into(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def out_of(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"].T, w.get(f"{name}.bias"))

    def attention(x: Tensor, layer: int, at: str) -> Tensor:
        norms = [w.get(f"{at}.attention.{name}_norm.weight") for name in ("q", "k")]
        return out_of(_attention(into(x, f"{at}.attention.qkv"), m, layer, text, norms), f"{at}.attention.out")

    def mlp(x: Tensor, at: str) -> Tensor:
        y = up = into(x, f"{at}.mlp.up") + w.get(f"{at}.mlp.up_bias", 0.0)
        y = into(x, f"{at}.mlp.gate") if m.activation in _GATED else y
        return out_of(_ACTIVATIONS[m.activation](y, up), f"{at}.mlp.down")

    x = w["embedding.tokens.weight"][text.tokens] * m.embedding_scale
    if m.position == "learned":
        x = x + w["embedding.positions.weight"][text.positions]
    x = dropped(x, m.layers, 0)
    for layer in range(m.layers):
        at, scale = f"blocks.{layer}", m.residual_scale
        first = norm(x, f"{at}.attention_norm")
        seen = norm(attention(first, layer, at), f"{at}.attention_post_norm")
        if m.residual == "serial":
            x = x + dropped(scale * seen, layer, 0)
            x = x + dropped(scale * norm(mlp(norm(x, f"{at}.mlp_norm"), at), f"{at}.mlp_post_norm"), layer, 1)
        else:
            second = first if m.residual == "parallel_shared" else norm(x, f"{at}.mlp_norm")
            x = x + dropped(scale * (seen + mlp(second, at)), layer, 0)
    logits = F.linear(norm(x, "head.norm"), w.get("head.weight", w["embedding.tokens.weight"])) * m.logit_scale
    logits = _capped(logits, m.softcap.logits)
    losses = -logits.log_softmax(-1).gather(-1, text.targets[..., None]).squeeze(-1)
    return losses + m.z_loss * logits.logsumexp(-1) ** 2


def _shapes(m: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of every parameter."""
    head, biased, gated = m.head_dim or m.hidden // m.heads, m.norm == "layernorm", m.activation in _GATED
    width, qkv = m.heads * head, (m.heads + 2 * m.kv_heads) * head
    norm = {"weight": (m.hidden,)} | ({"bias": (m.hidden,)} if biased and m.norm_bias is not False else {})
    places = ["attention_norm"] * (m.norm_place != "post") + ["attention_post_norm"] * (m.norm_place != "pre")
    places += ["mlp_norm"] * (m.norm_place != "post" and m.residual != "parallel_shared")
    places += ["mlp_post_norm"] * (m.norm_place != "pre")
    has = {each: biased if (given := getattr(m.bias, each)) is None else given for each in ("qkv", "out", "mlp")}
    yield "embedding.tokens.weight", (m.vocab, m.hidden)
    if m.position == "learned":
        yield "embedding.positions.weight", (m.seq_len, m.hidden)
    for at in (f"blocks.{i}" for i in range(m.layers)):
        yield from ((f"{at}.{place}.{name}", shape) for place in places for name, shape in norm.items())
        yield f"{at}.attention.qkv.weight", (qkv, m.hidden)
        yield f"{at}.attention.out.weight", (width, m.hidden)
        if m.qk_norm != "none":
            sizes = (head, head) if m.qk_norm == "head" else (width, m.kv_heads * head)
            yield from ((f"{at}.attention.{name}_norm.weight", (size,)) for name, size in zip("qk", sizes, strict=True))
        yield from ((f"{at}.mlp.{name}.weight", (m.ffn, m.hidden)) for name in (["gate"] * gated + ["up"]))
        yield f"{at}.mlp.down.weight", (m.ffn, m.hidden)
        yield from [(f"{at}.attention.qkv.bias", (qkv,))] * has["qkv"]
        yield from [(f"{at}.attention.out.bias", (m.hidden,))] * has["out"]
        if has["mlp"]:
            yield from ((f"{at}.mlp.{name}", (m.ffn,)) for name in (["gate.bias", "up.bias"] if gated else ["up_bias"]))
            yield f"{at}.mlp.down.bias", (m.hidden,)
    yield from ((f"head.norm.{name}", shape) for name, shape in norm.items())
    if not m.tie_embeddings:
        yield "head.weight", (m.vocab, m.hidden)


def _attention(qkv: Tensor, m: Any, layer: int, text: Text, norms: list[Tensor | None]) -> Tensor:
    """Return softmax(scale q k^T) v over the tokens that each token attends to: [B, S, H d].

    Args:
        norms: weights [d] of the RMS norms of queries and of keys; None: no norm.
    """
    size, kind = m.head_dim or m.hidden // m.heads, _kind(m, layer)
    parts = qkv.unflatten(-1, (m.kv_heads, m.heads // m.kv_heads + 2, size))  # [B, S, G, Q + 2, d]
    q, k, v = parts[..., :-2, :], parts[..., -2:-1, :], parts[..., -1, :]

    def normed(x: Tensor, w: Tensor | None, now: str) -> Tensor:
        if w is None or m.qk_norm_at != now:
            return x
        rows = x if m.qk_norm == "head" else x.flatten(2)
        return F.rms_norm(rows, w.shape, m.norm_offset + w, m.norm_eps).view_as(x)

    q, k = (normed(x, w, "before") for x, w in zip((q, k), norms, strict=True))
    if m.position == "rotary" and kind["rope"] is not None:
        q, k = (_turned(x, text.positions[..., None, None, None], kind["rope"], m) for x in (q, k))
    q, k = (normed(x, w, "after") for x, w in zip((q, k), norms, strict=True))
    if m.query_scale is not None:
        longer = torch.floor(text.positions.double() / m.query_scale.original)
        q = q * (1 + m.query_scale.beta * torch.log1p(longer))[..., None, None, None]
    scale = m.attention_scale or 1 / math.sqrt(size)
    scores = _capped(torch.einsum("bigqd,bjgd->bgqij", q, k.squeeze(-2)) * scale, m.softcap.attention)
    sees, place = text.sees, torch.arange(qkv.shape[1])
    if kind["window"] is not None:
        sees = sees & (place[:, None] - place < kind["window"])
    shares = scores.masked_fill(~sees[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bgqij,bjgd->bigqd", shares, v).flatten(2)


def _kind(m: Any, layer: int) -> dict[str, Any]:
    """Return the window and the rotary positions of a layer."""
    if m.layer_kinds is None:
        return {"window": None, "rope": {"kind": "plain", "share": 1.0}}
    names = m.layer_pattern or tuple(m.layer_kinds)
    return m.layer_kinds[names[layer % len(names)]].model_dump()


def _turned(x: Tensor, positions: Tensor, rope: Mapping[str, Any], m: Any) -> Tensor:
    """Return x with its channel pairs (i, i + d / 2) turned; those beyond the share stay."""
    size = x.shape[-1]
    pairs = int(size * rope["share"]) // 2
    angle = positions * frequencies(rope, 2 * pairs, rope.get("theta") or m.rope_theta, m.seq_len)
    factor = _attention_factor(rope)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    first, second = x[..., : size // 2], x[..., size // 2 :]
    a, b = first[..., :pairs], second[..., :pairs]
    turned = a * cos - b * sin, first[..., pairs:], b * cos + a * sin, second[..., pairs:]
    return torch.cat(turned, -1)


def frequencies(rope: Mapping[str, Any], dim: int, theta: float, seq_len: int) -> Tensor:
    """Return radians per position of each of dim / 2 pairs, fp64."""
    kind, factor, length = rope["kind"], rope.get("factor") or 1.0, rope.get("original") or 1
    if kind == "ntk":
        theta *= (rope.get("alpha") or 1.0) ** (dim / (dim - 2))
    f = theta ** (-torch.arange(0, dim, 2).double() / dim)
    if kind == "linear":
        return f / factor
    if kind == "longrope":
        return f / torch.tensor(rope["long" if seq_len > length else "short"]).double()
    if kind == "llama3":
        low, high = rope.get("low") or 1.0, rope.get("high") or 4.0
        s = ((length * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return f * (s + (1 - s) / factor)
    if kind == "yarn":

        def pair(turns: float) -> float:
            return dim * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

        first, last = pair(rope.get("beta_fast") or 32.0), pair(rope.get("beta_slow") or 1.0)
        if rope.get("truncate") is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        slowed = ((torch.arange(dim // 2).double() - first) / ((last - first) or 0.001)).clamp(0, 1)
        return f * (1 - slowed + slowed / factor)
    return f


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """Return the factor of cos and sin: arXiv 2309.00071 section 3.4, 2402.13753 section 3.3."""
    factor, given = rope.get("factor") or 1.0, rope.get("attention_factor")
    if given or rope["kind"] not in ("yarn", "longrope"):
        return given or 1.0
    if rope["kind"] == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(rope["original"]))
    some, all_ = rope.get("mscale"), rope.get("mscale_all")
    above, below = (some, all_) if some and all_ else (1.0, 0.0)
    return (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
