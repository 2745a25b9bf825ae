"""The fused CPU kernels against the specification in fp64: random shapes, odd and empty, unaligned memory, poison."""

import math
import shutil
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero.kernels import cpu, reference
from megazero.kernels.samples import KEY
from tests.kernels.test_schema import OPERATIONS, sample

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
fused = torch.ops.megazero
# Of the largest number in a tensor: a few fp32 roundings of an exponential, a sum, a quotient. What is rounded to 16
# bits may be off by half a unit of its last place on top.
TOLERANCE = 1e-6
DTYPES = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float32, marks=pytest.mark.full),
        torch.bfloat16,
        pytest.param(torch.float16, marks=pytest.mark.full),
    ],
    ids=["fp32", "bf16", "fp16"],
)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    cpu.load()


class Source:
    """Random tensors of a dtype that begin at an odd place in memory, and what they are multiplied by."""

    def __init__(self, dtype: torch.dtype, seed: int, offset: int, scale: float):
        self.dtype, self.offset, self.scale = dtype, offset, scale
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        numel = math.prod(shape)
        values = torch.randn(numel + self.offset, generator=self.generator) * self.scale
        return values.to(dtype or self.dtype)[self.offset :].view(shape)


def norm(name: str) -> Callable[..., list[tuple[object, ...]]]:
    def make(draw: Source, rows: int, columns: int) -> list[tuple[object, ...]]:
        columns += 7  # of one or two numbers a norm leaves the sign: its gradient is all cancellation
        x, residual, grad, other = (draw(rows, columns) for _ in range(4))
        weights = [draw(columns), draw(columns)] if name == "layer_norm" else [draw(columns)]
        _, *statistics = getattr(fused, name)(x, *weights, 1e-5)
        found: list[tuple[object, ...]] = []
        for moved in (0.0, 1.0):
            numbers = (1e-5, moved) if name == "layer_norm" else (1e-5, moved, False)
            found += [
                (name, x, *weights, *numbers),
                (f"{name}_backward", grad, x, *statistics, weights[0], moved),
                (f"add_{name}", x, residual, *weights, *numbers),
                (f"add_{name}_backward", grad, other, x, *statistics, weights[0], moved),
            ]
        return found

    return make


def activations(draw: Source, rows: int, columns: int) -> list[tuple[object, ...]]:
    x, grad, up, bias = draw(rows, columns), draw(rows, columns), draw(rows, columns), draw(columns)
    found: list[tuple[object, ...]] = [("swiglu", x, up), ("swiglu_backward", grad, x, up)]
    for each in (bias, None):
        found += [("bias_gelu", x, each), ("bias_gelu_backward", grad, x, each)]
    sums = draw(columns, dtype=torch.float32)
    return [*found, ("sum_rows_", sums, x, False), ("sum_rows_", sums, x, True)]


def dropout(draw: Source, rows: int, columns: int) -> list[tuple[object, ...]]:
    x, residual = draw(rows, 3, columns), draw(rows, 3, columns)
    site = torch.tensor([5, 1 << 40, (1 << 62) + 3]), torch.arange(1000, 1000 + rows), KEY, 0.3
    return [("dropout_add", x, residual, *site), ("dropout_backward", x, *site)]


def rotary(draw: Source, rows: int, columns: int) -> list[tuple[object, ...]]:
    d = 2 * columns
    x = draw(rows, 2, 9, d)[:, :, 2:7:2]
    found: list[tuple[object, ...]] = []
    for batch in (1, 2):
        half = draw(rows, batch, 1, columns)
        angles = torch.cat((half, half), -1)
        found += [
            ("rotary", each, angles.cos(), angles.sin(), batch == 1) for each in (x, x[:, :1].expand(-1, 2, -1, -1))
        ]
    return found


def flat(draw: Source, rows: int, columns: int) -> list[tuple[object, ...]]:
    x = draw(rows * columns)
    return [
        ("sums_of_squares", [x, x[: len(x) // 3], x[:0]]),
        ("accumulate_", draw(rows * columns, dtype=torch.float32), x),
    ]


FAMILIES = {
    "layer_norm": norm("layer_norm"),
    "rms_norm": norm("rms_norm"),
    "activations": activations,
    "dropout": dropout,
    "rotary": rotary,
    "flat": flat,
}


def run(library: object, name: str, arguments: tuple[object, ...]) -> list[Tensor]:
    """What comes out, and what was written over."""
    own = [each.clone() if isinstance(each, Tensor) and i == 0 else each for i, each in enumerate(arguments)]
    returned = getattr(library, name)(*own)
    return [each for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)] or [own[0]]


def poison(arguments: tuple[object, ...]) -> None:
    """What results will probably be allocated in is full of NaN."""
    tensors = [each for each in arguments if isinstance(each, Tensor) and each.is_floating_point()]
    kept = [torch.full(each.shape, math.nan, dtype=dtype) for each in tensors for dtype in (each.dtype, torch.float32)]
    kept += [torch.full_like(each, math.nan) for each in kept]


def close(found: Tensor, expected: Tensor) -> bool:
    rounding = 0.0 if found.dtype == torch.float64 else torch.finfo(found.dtype).eps / 2
    smallest = torch.finfo(found.dtype).smallest_normal * rounding  # subnormal numbers lose places
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()) if len(expected.flatten()) else 1.0)
    return bool(((found - expected).abs() <= allowed + rounding * expected.abs() + smallest).all())


@pytest.mark.parametrize("family", FAMILIES)
@DTYPES
@settings(max_examples=25)
@given(st.integers(0, 9), st.integers(1, 150), st.integers(0, 3), st.sampled_from([0.01, 1.0, 8.0]), st.integers(0, 99))
def test_against_the_specification(
    family: str, dtype: torch.dtype, rows: int, columns: int, offset: int, scale: float, seed: int
) -> None:
    for name, *arguments in FAMILIES[family](Source(dtype, seed, offset, scale), rows, columns):
        poison(tuple(arguments))
        found = run(fused, str(name), tuple(arguments))
        if str(name).startswith("add_") and not str(name).endswith("backward"):  # what is normed is the rounded sum
            assert torch.equal(found[0], arguments[0] + arguments[1])  # type: ignore[operator]
            arguments[:2] = [found[0], torch.zeros_like(found[0])]
        exact = pytree.tree_map_only(
            Tensor, lambda each: each.double() if each.is_floating_point() else each, arguments
        )
        for mine, theirs in zip(found, run(reference, str(name), tuple(exact)), strict=True):
            assert mine.is_contiguous() and close(mine, theirs), name


@DTYPES
def test_an_rms_norm_rounds_twice(dtype: torch.dtype) -> None:
    """As in Llama: the normed numbers, then their product with the weight."""
    x, residual, weight = (Source(dtype, seed, 0, 1.0)(*shape) for seed, shape in enumerate([(7, 77), (7, 77), (77,)]))
    for offset in (0.0, 1.0):
        z, _ = fused.rms_norm(x, torch.ones_like(weight), 1e-5, 0.0, False)
        expected = (z.float() * (weight.float() + offset)).to(dtype)
        assert torch.equal(fused.rms_norm(x, weight, 1e-5, offset, True)[0], expected)
        total, y, _ = fused.add_rms_norm(x, residual, weight, 1e-5, offset, True)
        assert torch.equal(y, fused.rms_norm(total, weight, 1e-5, offset, True)[0])


@DTYPES
@settings(max_examples=30)
@given(st.integers(0, 5), st.integers(1, 9000), st.integers(0, 3), st.sampled_from([1.0, 30.0]), st.integers(0, 99))
def test_cross_entropy(dtype: torch.dtype, rows: int, columns: int, offset: int, scale: float, seed: int) -> None:
    """Forward, and the gradient over the logits where they lie; with a part of the vocabulary that is elsewhere."""
    draw = Source(dtype, seed, offset, scale)
    logits, grad = draw(rows, columns), draw(rows, dtype=torch.float32)
    targets = torch.randint(-3, columns + 3, (rows,), generator=draw.generator)
    elsewhere = torch.tensor([1.0, 2.0, -math.inf]).double()[:, None].expand(3, rows)
    works = [logits.clone(), logits.double()]
    parts = [
        library.cross_entropy_parts_(work, targets) for library, work in zip((fused, reference), works, strict=True)
    ]
    assert torch.equal(parts[0][::2], parts[1][::2].float())
    assert torch.allclose(parts[0][1].double(), parts[1][1], rtol=3e-6)
    for library, work, part in zip((fused, reference), works, parts, strict=True):
        _, log_sums = reference.cross_entropy_merge(torch.stack((part, elsewhere.to(part.dtype))))
        library.cross_entropy_backward_(work, part[0], log_sums, targets, grad.to(part.dtype))
    # log_sums is in fp32, and so is off by its last place: as much is every logit beside it.
    error = (works[0] - works[1]).abs() / (grad.abs()[:, None] + 1e-30) if rows else torch.zeros(1)
    assert error.max() <= torch.finfo(dtype).eps + 2e-7 * max(32.0, float(logits.abs().max()) if rows else 0.0)


@DTYPES
def test_cross_entropy_of_a_part_that_is_all_padding(dtype: torch.dtype) -> None:
    logits, targets = torch.full((5, 700), -math.inf, dtype=dtype), torch.tensor([-1, 0, 700, 3, 5])
    maxima, sums, picked = fused.cross_entropy_parts_(logits, targets)
    assert torch.equal(maxima, torch.full((5,), torch.finfo(dtype).min)) and not sums.any() and picked.isneginf().all()
    fused.cross_entropy_backward_(logits, maxima, torch.full((5,), 3.0), targets - 1000, torch.ones(5))
    assert not logits.any()


@DTYPES
def test_the_mask_is_the_counter_s(dtype: torch.dtype) -> None:
    """Bit for bit, for any key, sample and position, and for probabilities at both ends."""
    ones, generator = torch.ones(7, 3, 333, dtype=dtype), torch.Generator().manual_seed(0)
    for drop in (0.0, 1e-9, 0.1, 0.5, 0.999):
        ids = torch.randint(0, 2**63 - 1, (3,), generator=generator)
        positions = torch.randint(0, 2**31, (7,), generator=generator)
        key = int(torch.randint(0, 2**32, (), generator=generator))
        found, expected = (each.dropout_backward(ones, ids, positions, key, drop) for each in (fused, reference))
        assert torch.equal(found != 0, expected != 0)
        assert torch.equal(fused.dropout_add(ones, 0 * ones, ids, positions, key, drop), found)


def large(dtype: torch.dtype) -> list[tuple[object, ...]]:
    """Of every family, and much more than one thread's share."""
    draw = Source(dtype, 0, 1, 1.0)
    return [call for family in FAMILIES.values() for call in family(draw, 300, 401)]


@DTYPES
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    for name, *arguments in large(dtype):
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(fused, str(name), tuple(arguments)))
        torch.set_num_threads(1)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), name


@DTYPES
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """Its bits are the same alone, so layouts that cut the rows otherwise can be compared."""
    draw = Source(dtype, 0, 1, 1.0)
    x, grad, weight = draw(70, 401), draw(70, 401), draw(401)
    logits, targets = draw(70, 5000), torch.arange(70)
    for rows in (slice(0, 1), slice(3, 68)):
        y, mean, rstd = fused.layer_norm(x, weight, weight, 1e-5)
        part = fused.layer_norm(x[rows], weight, weight, 1e-5)
        assert all(torch.equal(a[rows], b) for a, b in zip((y, mean, rstd), part, strict=True))
        whole = fused.layer_norm_backward(grad, x, mean, rstd, weight)[0]
        assert torch.equal(
            whole[rows], fused.layer_norm_backward(grad[rows], x[rows], mean[rows], rstd[rows], weight)[0]
        )
        assert torch.equal(fused.bias_gelu(x, weight)[rows], fused.bias_gelu(x[rows], weight))
        assert torch.equal(fused.swiglu(x, grad)[rows], fused.swiglu(x[rows], grad[rows]))
        found = fused.cross_entropy_parts_(logits, targets)[:, rows]
        assert torch.equal(found, fused.cross_entropy_parts_(logits[rows], targets[rows]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@DTYPES
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, bad: float) -> None:
    """Rows without it are as before, and a NaN is never lost."""
    for name, *arguments in large(dtype):
        if name in ("sums_of_squares", "sum_rows_", "accumulate_", "rotary"):
            continue
        clean = run(fused, str(name), tuple(arguments))
        spoilt = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
        spoilt[0].view(-1, arguments[0].shape[-1])[7, 3] = bad  # type: ignore[union-attr]
        found = run(fused, str(name), tuple(spoilt))
        width = clean[0].shape[-1]
        rows = clean[0].view(-1, width), found[0].view(-1, width)
        others = torch.arange(len(rows[0])) != 7
        assert torch.equal(rows[0][others], rows[1][others]), name
        assert rows[1][7].isnan().any() or not math.isnan(bad), name


@pytest.mark.parametrize("bits", [0x7F81, 0xFFFF])
def test_no_nan_of_bfloat16_is_rounded_away(bits: int) -> None:
    """Of any payload and sign: rounding adds to the bits of a number, and must not carry out of a NaN's."""
    bad = torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for name, *arguments in large(torch.bfloat16):
        if name == "sums_of_squares":
            continue
        spoilt = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
        position = 1 if name in ("accumulate_", "sum_rows_") else 0
        spoilt[position].view(-1, arguments[position].shape[-1])[-1, 2] = bad  # type: ignore[union-attr]
        assert any(each.isnan().any() for each in run(fused, str(name), tuple(spoilt))), name


def test_a_nan_of_fp32_statistics_is_not_rounded_away() -> None:
    """All ones, as in memory that nobody wrote: one more would make a zero of it."""
    bad = torch.full((9, 1), -1, dtype=torch.int32).view(torch.float32)
    draw, good = Source(torch.bfloat16, 0, 0, 1.0), torch.ones(9, 1)
    x, grad, weight = draw(9, 33), draw(9, 33), draw(33)
    for mean, rstd in ((bad, good), (good, bad)):
        assert fused.layer_norm_backward(grad, x, mean, rstd, weight)[0].isnan().all()
        assert fused.add_layer_norm_backward(grad, grad, x, mean, rstd, weight)[0].isnan().all()
    assert fused.rms_norm_backward(grad, x, bad, weight)[0].isnan().all()
    targets, logs = torch.arange(9), good.flatten()
    for log_sums, grads in ((bad.flatten(), logs), (logs, bad.flatten())):
        logits = x.clone()
        fused.cross_entropy_backward_(logits, logs, log_sums, targets, grads)
        assert logits.isnan().all()


def test_gelu_and_silu_of_special_values() -> None:
    x = torch.tensor([math.nan, math.inf, 3e38, -3e38, -0.0, 1e-40, -1e4, 1e4])
    huge = torch.tensor([3e38, 0.0, 0.0, 1e4])
    for y in (fused.bias_gelu(x, None), fused.swiglu(x, torch.ones(8))):
        assert y[0].isnan() and y[1] == math.inf
        assert torch.equal(y[[2, 3, 6, 7]], huge)
        assert torch.equal(y[4:6], x[4:6] / 2)
    ones, slopes = torch.ones(8), torch.tensor([1.0, 0, 0, 1])
    for gradient in (fused.bias_gelu_backward(ones, x, None)[0], fused.swiglu_backward(ones, x, ones)[0]):
        assert gradient[0].isnan()
        assert torch.allclose(gradient[[2, 3, 6, 7]], slopes, atol=1e-30)
        assert torch.allclose(gradient[4:6], torch.tensor(0.5))
    assert torch.equal(fused.swiglu_backward(ones, x, ones)[1][[2, 3, 6, 7]], huge)


def test_conversions_are_torch_s() -> None:
    """Ties, subnormals, what overflows, infinities, NaN; from each dtype to each."""
    bits = torch.arange(0, 2**32, 65_521, dtype=torch.int64)
    bits = torch.cat((bits, torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x00008000, 0x477FF000])))
    every = torch.arange(0, 2**16, dtype=torch.int32).to(torch.int16)
    for x in (bits.to(torch.int32).view(torch.float32), every.view(torch.bfloat16), every.view(torch.float16)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = torch.full_like(x, math.nan, dtype=dtype)
            fused.cast_(found, x)
            expected = x.to(dtype)
            assert torch.equal(found.isnan(), expected.isnan())
            assert torch.equal(found[~expected.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 65_535, 65_536, 65_537, 300_001])
def test_sums_of_squares(numel: int) -> None:
    """Each of the tensors as if it were alone, whatever lies around it in the list."""
    flat = torch.randn(numel + 1, generator=torch.Generator().manual_seed(0))[1:]
    flats = [flat[:0], flat, flat[: numel // 2], flat[:0], flat[numel // 2 :], flat[:0]]
    found = fused.sums_of_squares(flats)
    assert found.dtype == torch.float64 and found.shape == (len(flats),)
    for each, total in zip(flats, found, strict=True):
        assert abs(total.item() - math.fsum(v * v for v in each.tolist())) <= 1e-14 * numel
        assert torch.equal(fused.sums_of_squares([each])[0], total)


def test_not_finite_values_reach_the_sum() -> None:
    for poison in (math.nan, math.inf):
        flat = torch.ones(100_000)
        flat[77_777] = poison
        assert not math.isfinite(fused.sums_of_squares([flat]).item())


def test_wrong_inputs_are_refused() -> None:
    x = torch.ones(4, 4)
    for message, call in (
        ("expected fp32, bf16 or fp16", lambda: fused.bias_gelu(x.double(), None)),
        ("contiguous", lambda: fused.bias_gelu(x.T, None)),
        ("contiguous", lambda: fused.swiglu(x, x.T)),
        ("sizes differ", lambda: fused.bias_gelu(x, torch.ones(3))),
        ("one dtype", lambda: fused.layer_norm(x, x[0].bfloat16(), x[0], 1e-5)),
        ("sizes differ", lambda: fused.add_rms_norm(x, x[:2], x[0], 1e-5)),
        ("even number", lambda: fused.rotary(torch.ones(1, 1, 1, 3), *torch.ones(2, 1, 1, 1, 3), False)),
        ("d contiguous", lambda: fused.rotary(torch.ones(1, 1, 4, 4).mT, *torch.ones(2, 1, 1, 1, 4), False)),
        ("expected .S, B, D.", lambda: fused.dropout_backward(x, *torch.ones(2, 4).long(), KEY, 0.1)),
        ("a key of 32 bits", lambda: fused.dropout_backward(x[None], *torch.ones(2, 4).long(), 1 << 32, 0.1)),
        ("0 <= drop < 1", lambda: fused.dropout_backward(x[None], *torch.ones(2, 4).long(), KEY, 1.0)),
        ("got a scalar", lambda: fused.layer_norm(x[0, 0], x[0], x[0], 1e-5)),
        ("got a scalar", lambda: fused.bias_gelu(x[0, 0], None)),
        ("expected .N, V.", lambda: fused.cross_entropy_parts_(x[0], torch.ones(4).long())),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.parametrize("name", OPERATIONS)
@DTYPES
def test_the_library_keeps_to_the_schema(name: str, dtype: torch.dtype) -> None:
    """Nothing is written or returned but what the schema says, and tensors without data come out alike."""
    arguments = sample(name, dtype)
    torch.library.opcheck(getattr(fused, name).default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_torch_compile_traces_them() -> None:
    """In one graph, without a break."""

    def block(x: Tensor, weight: Tensor) -> Tensor:
        total, y, _ = fused.add_rms_norm(x, x, weight, 1e-5)
        return fused.swiglu(fused.bias_gelu(y, weight), total)

    x, weight = torch.randn(5, 24, generator=torch.Generator().manual_seed(0)), torch.ones(24)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), block(x, weight))
