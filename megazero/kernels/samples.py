"""Make random arguments of any size for every operation, and measure the errors of results.

The expected results are those of the specification (`reference`) on the same arguments in fp64. docs/kernels.md states
the allowed error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero.base.quantized import quantized_bytes
from megazero.kernels import reference, schema

KEY = 0xFEDCBA98
DROP = 0.1
_EPS = 1e-5
# Allowed fp32 roundings of a result, in units of the largest result: from sums over a row or over the rows of a block,
# and from an exponential with an argument of some tens.
_ROUNDINGS = 32

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes: x is [sequence, batch, hidden], activations [.., ffn], rotated heads [.., heads, head_dim]."""

    sequence: int
    batch: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    head_dim: int
    flat: int


@dataclass(frozen=True)
class Draw:
    """A source of random tensors of one dtype on the device of the generator, or on another one."""

    dtype: torch.dtype
    generator: torch.Generator
    to: torch.device | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.to or self.generator.device

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.device, dtype or self.dtype)

    def fp32(self, *shape: int) -> Tensor:
        """Draw a normal tensor in fp32."""
        return self(*shape, dtype=torch.float32)

    def words(self, *shape: int, low: int, high: int) -> Tensor:
        """Draw integers in [low, high)."""
        drawn = torch.randint(low, high, shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.device)


Make = Callable[[Draw, Sizes], Arguments]


def _stream(draw: Draw, s: Sizes) -> Tensor:
    """Return values of the residual stream."""
    return draw(s.sequence, s.batch, s.hidden)


def _inner(draw: Draw, s: Sizes) -> Tensor:
    """Return values inside of the MLP."""
    return draw(s.sequence, s.batch, s.ffn)


def _norm(draw: Draw, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return x (with a mean that is not 0), weight, bias."""
    return _stream(draw, s) * 2 + 0.5, draw(s.hidden) * 0.1 + 1, draw(s.hidden)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, 1 / standard deviation and 1 / root mean square of the rows, in fp32."""
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    rstd = (wide.var(-1, keepdim=True, correction=0) + _EPS).rsqrt()
    return mean.float(), rstd.float(), (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt().float()


def _norm_backward(draw: Draw, s: Sizes, grads: int, name: str) -> Arguments:
    """Return gradients, x, its statistics and the weight of a LayerNorm or an RMSNorm."""
    x, weight, _ = _norm(draw, s)
    *of_layer, rrms = _statistics(x)
    return *(draw(*x.shape) for _ in range(grads)), x, *(of_layer if name == "layer" else [rrms]), weight


def _mask(draw: Draw, s: Sizes) -> Arguments:
    return draw.words(s.batch, low=0, high=1 << 40), draw.words(s.sequence, low=0, high=1 << 20), KEY, DROP


def _rotary(draw: Draw, s: Sizes) -> Arguments:
    """Return the query part of a fused product, and the cosines and sines of each position."""
    length = 4 * s.sequence  # otherwise it would fit into the cache of a large GPU
    product = draw(length, s.batch, s.heads, 3, s.head_dim)
    half = draw.fp32(length, 1, 1, s.head_dim // 2) * 3
    angles = torch.cat((half, half), -1)
    return product[:, :, :, 0], angles.cos().to(draw.dtype), angles.sin().to(draw.dtype)


def _logits(draw: Draw, s: Sizes) -> tuple[Tensor, Tensor]:
    """Return logits, and targets; some targets belong to another part of the vocabulary."""
    rows = s.sequence * s.batch
    return draw(rows, s.vocab) * 3, draw.words(rows, low=-s.vocab // 2, high=s.vocab + s.vocab // 2)


def _loss_gradient(draw: Draw, s: Sizes) -> Arguments:
    logits, targets = _logits(draw, s)
    wide = logits.float()
    return logits, wide.amax(-1), wide.logsumexp(-1), targets, draw.fp32(len(logits))


def _update(draw: Draw, s: Sizes) -> Arguments:
    """Return an update after several steps, with fp32 gradients that it divides by 300."""
    low = torch.bfloat16 if draw.dtype == torch.float32 else draw.dtype
    numbers = (torch.tensor(each, device=draw.device) for each in (7.0, 300.0, 0.0))
    memory = (draw.fp32(s.flat), draw.fp32(s.flat) * 256, draw.fp32(s.flat) * 0.1, draw.fp32(s.flat).square() * 0.01)
    return *memory, draw(s.flat, dtype=low), *numbers, 1e-3, 0.9, 0.95, 1e-8, 0.1


def _cast(draw: Draw, s: Sizes) -> Arguments:
    return draw(s.flat, dtype=torch.bfloat16 if draw.dtype == torch.float32 else draw.dtype), draw.fp32(s.flat)


def _quantize(bits: int) -> Make:
    """Return a function that makes arguments of `quantize_` with this number of bits."""

    def make(draw: Draw, s: Sizes) -> Arguments:
        x = draw(16 * (s.flat // 16 + 1))
        return torch.zeros(quantized_bytes(len(x), bits), dtype=torch.uint8, device=x.device), x, bits

    return make


def _dequantize(bits: int, *, add: bool) -> Make:
    """Return a function that makes arguments of `dequantize_`, quantised by the specification."""

    def make(draw: Draw, s: Sizes) -> Arguments:
        codes, x, _ = _quantize(bits)(draw, s)
        reference.quantize_(codes, x, bits)
        return draw(len(x)), codes, bits, add

    return make


# Arguments of each operation, in the schema's order.
SAMPLES: dict[str, Make] = {
    "layer_norm": lambda draw, s: (*_norm(draw, s), _EPS),
    "layer_norm_backward": lambda draw, s: _norm_backward(draw, s, 1, "layer"),
    "rms_norm": lambda draw, s: (*_norm(draw, s)[:2], _EPS, 0.0, False),
    "rms_norm_backward": lambda draw, s: _norm_backward(draw, s, 1, "rms"),
    "add_layer_norm": lambda draw, s: (_stream(draw, s), *_norm(draw, s), _EPS),
    "add_layer_norm_backward": lambda draw, s: _norm_backward(draw, s, 2, "layer"),
    "add_rms_norm": lambda draw, s: (_stream(draw, s), *_norm(draw, s)[:2], _EPS, 0.0, False),
    "add_rms_norm_backward": lambda draw, s: _norm_backward(draw, s, 2, "rms"),
    "bias_gelu": lambda draw, s: (_inner(draw, s) * 2, draw(s.ffn)),
    "bias_gelu_backward": lambda draw, s: (_inner(draw, s), _inner(draw, s) * 2, draw(s.ffn)),
    "sum_rows_": lambda draw, s: (draw.fp32(s.ffn), _inner(draw, s), False),
    "swiglu": lambda draw, s: (_inner(draw, s) * 2, _inner(draw, s)),
    "swiglu_backward": lambda draw, s: (_inner(draw, s), _inner(draw, s) * 2, _inner(draw, s)),
    "dropout_add": lambda draw, s: (_stream(draw, s), _stream(draw, s), *_mask(draw, s)),
    "dropout_backward": lambda draw, s: (_stream(draw, s), *_mask(draw, s)),
    "rotary": lambda draw, s: (*_rotary(draw, s), False),
    "cross_entropy_parts_": _logits,
    "cross_entropy_backward_": _loss_gradient,
    "adamw_": _update,
    "sums_of_squares": lambda draw, s: ([draw(s.flat), draw(s.flat // 3), draw(0)],),
    "accumulate_": lambda draw, s: (draw.fp32(s.flat), draw(s.flat)),
    "cast_": _cast,
    "quantize_": _quantize(8),
    "dequantize_": _dequantize(8, add=False),
}


def _narrow_update(draw: Draw, s: Sizes) -> Arguments:
    master, grad, first, second, published, *rest = _update(draw, s)
    return master, grad.to(published.dtype), first, second, published, *rest


def _skipped_update(draw: Draw, s: Sizes) -> Arguments:
    arguments = _update(draw, s)
    return *arguments[:7], torch.ones_like(arguments[7]), *arguments[8:]


def _more(name: str, *others: object, last: int = 0) -> Make:
    """Return a function that makes an operation's arguments with others in place of the last ones."""

    def make(draw: Draw, s: Sizes) -> Arguments:
        arguments = SAMPLES[name](draw, s)
        return *arguments[: len(arguments) - last], *others

    return make


_NORMS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
# Other forms of the operations above; each name begins with that of the operation.
FORMS: dict[str, Make] = {
    **{f"{name}, offset": _more(name, 1.0) for name in ("layer_norm", "add_layer_norm")},
    **{f"{name}, offset": _more(name, 1.0, False, last=2) for name in ("rms_norm", "add_rms_norm")},
    **{f"{name}, rounded twice": _more(name, 0.0, True, last=2) for name in ("rms_norm", "add_rms_norm")},
    **{f"{name}_backward, offset": _more(f"{name}_backward", 1.0) for name in _NORMS},
    "bias_gelu, no bias": _more("bias_gelu", None, last=1),
    "bias_gelu_backward, no bias": _more("bias_gelu_backward", None, last=1),
    "sum_rows_, added": _more("sum_rows_", True, last=1),
    "rotary, inverse": _more("rotary", True, last=1),
    "adamw_, narrow gradients": _narrow_update,
    "adamw_, skipped": _skipped_update,
    "cast_, widening": lambda draw, s: _cast(draw, s)[::-1],
    "quantize_, 4 bits": _quantize(4),
    "dequantize_, 4 bits": _dequantize(4, add=False),
    "dequantize_, added": _dequantize(8, add=True),
    "dequantize_, 4 bits, added": _dequantize(4, add=True),
}


def written(name: str) -> list[int]:
    """Return the places of the arguments that an operation writes."""
    arguments = getattr(getattr(torch.ops, schema.NAMESPACE), name).default._schema.arguments
    return [place for place, argument in enumerate(arguments) if argument.alias_info is not None]


def results(
    implementation: Any, name: str, arguments: Arguments, copy: Callable[[Tensor], Tensor] = Tensor.clone
) -> tuple[Tensor, ...]:
    """Run an operation on copies of the arguments it writes; return its results, then the written arguments."""
    places = written(name)
    own = [copy(each) if place in places else each for place, each in enumerate(arguments)]
    returned = getattr(implementation, name)(*own)
    if isinstance(returned, Tensor):
        returned = (returned,)
    # Leave out the logits: each implementation of the loss leaves in them what its own backward needs.
    return (*(returned or ()), *(own[place] for place in places if name != "cross_entropy_parts_"))


def truth(name: str, arguments: Arguments) -> tuple[Tensor, ...]:
    """Return the expected results in fp64."""
    wide = pytree.tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, arguments)
    if name.startswith("add_") and not name.endswith("backward"):  # the norm is of the rounded sum
        total = (arguments[0] + arguments[1]).double()
        return wide[0] + wide[1], *getattr(reference, name.removeprefix("add_"))(total, *wide[2:])
    if name == "cross_entropy_backward_":  # on the output of the specification's own forward
        logits = wide[0].clone()
        return results(reference, name, (logits, reference.cross_entropy_parts_(logits, wide[3])[0], *wide[2:]))
    return results(reference, name, wide)


def distances(name: str, arguments: Arguments, found: tuple[Tensor, ...]) -> list[float]:
    """Return `distance` of each result of an operation."""
    scales = [0.0] * len(found)
    if "norm_backward" in name:
        scales = _gradient_scales(arguments, len(found))
    elif "norm" in name:
        scales = _norm_scales(name, arguments, found)
    elif name in ("bias_gelu_backward", "sum_rows_"):  # sums over rows of terms of this size
        scales[-1] = float(arguments[name == "sum_rows_"].abs().max())
    expected = truth(name, arguments)
    twice = name in ("rms_norm", "add_rms_norm") and arguments[-1] is True  # y is rounded twice
    roundings = [1 + (twice and place == len(found) - 2) for place in range(len(found))]
    return [distance(*each) for each in zip(found, expected, scales, roundings, strict=True)]


def _norm_scales(name: str, arguments: Arguments, found: tuple[Tensor, ...]) -> list[float]:
    """Return the scale of errors from a rounding of x, which is multiplied by 1 / standard deviation."""
    adds = name.startswith("add_")
    x, rstd = float((found[0] if adds else arguments[0]).abs().max()), float(found[-1].max())
    _, offset, *_ = (*(each for each in arguments if isinstance(each, float)), 0.0)
    y = x * rstd * float((arguments[1 + adds] + offset).abs().max())
    return [*([x] if adds else []), y, *([x] if "layer" in name else []), rstd * (1 + x * rstd)]


def _gradient_scales(arguments: Arguments, count: int) -> list[float]:
    """Return the sizes of the terms: dx is a difference of such terms, dweight and dbias are sums over rows."""
    offset = arguments[-1] if isinstance(arguments[-1], float) else 0.0
    *_, rstd, weight = tensors = [each for each in arguments if isinstance(each, Tensor)]
    x, mean = tensors[-4:-2] if count == 3 else (tensors[-3], 0.0)
    grad = float(arguments[0].abs().max())
    z = float(((x.float() - mean) * rstd).abs().max())
    return [grad * float(rstd.max() * (weight + offset).abs().max()) * (1 + z), grad * z, grad][:count]


def distance(found: Tensor, expected: Tensor, scale: float = 0.0, roundings: int = 1) -> float:
    """Return the largest error in units of the allowed error: up to 1 passes. NaN and infinities must agree.

    Allowed are the `roundings` of the result itself, in its dtype, plus _ROUNDINGS fp32 roundings of the largest
    result, or of `scale` if that is larger.
    """
    if not found.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    odd = ~expected.isfinite()
    if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    if not torch.equal(found[odd & ~expected.isnan()].double(), expected[odd & ~expected.isnan()]):
        return float("inf")
    found, expected, dtype = found[~odd].double(), expected[~odd], found.dtype
    if not len(found):
        return 0.0
    own = torch.finfo(dtype)
    wide = _ROUNDINGS * torch.finfo(torch.float32 if dtype != torch.float64 else dtype).eps / 2
    largest = expected.abs().max().clamp(min=scale)
    allowed = roundings * own.eps / 2 * expected.abs() * (1 + own.eps) + wide * largest + own.smallest_normal * own.eps
    return float(((found - expected).abs() / allowed).max().nan_to_num(nan=float("inf")))
