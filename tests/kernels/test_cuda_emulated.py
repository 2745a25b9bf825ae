"""Every CUDA kernel, unmodified, on emulated blocks against its specification in fp64: any shape, poisoned memory."""

import math
import mmap
import shutil
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from megazero.kernels import counter, reference
from megazero.kernels.samples import DROP, KEY, SAMPLES, Draw, Sizes, distance, distances, results, truth
from tests.kernels.emulated import Emulated, Own, Written, library, poisoned

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = sorted(SAMPLES)
SMALL = Sizes(sequence=3, batch=2, hidden=64, ffn=48, vocab=72, heads=2, head_dim=16, flat=100)
DIMENSIONS = st.one_of(st.integers(1, 5), st.sampled_from([8, 16, 24, 33, 40, 257, 264, 1032]))


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Odd and even, one row, one column, a few packs, more than a warp."""
    return Sizes(
        sequence=draw(st.integers(1, 4)),
        batch=draw(st.integers(1, 3)),
        hidden=draw(DIMENSIONS),
        ffn=draw(DIMENSIONS),
        vocab=draw(DIMENSIONS),
        heads=draw(st.integers(1, 3)),
        head_dim=2 * draw(st.sampled_from([1, 3, 4, 8, 16])),
        flat=draw(st.sampled_from([1, 3, 4, 7, 1000, 4099, 33_000])),
    )


def sample(name: str, dtype: torch.dtype, shape: Sizes, seed: int = 0) -> tuple:
    return SAMPLES[name](Draw(dtype, torch.Generator().manual_seed(seed)), shape)


def errors(emulated: Emulated, name: str, arguments: tuple) -> float:
    return max(distances(name, arguments, results(emulated, name, arguments)))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=7)
@given(
    st.sampled_from(DTYPES),
    sizes(),
    st.sampled_from([0, 0, 1, 3]),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_operation(
    name: str, dtype: torch.dtype, shape: Sizes, offset: int, multiprocessors: int, descending: bool, seed: int
) -> None:
    arguments = sample(name, dtype, shape, seed)
    assert errors(Emulated(offset, multiprocessors, descending), name, arguments) <= 1


# Where a launcher changes to another kernel: a row held in fewer or more registers, or not at all.
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype", "columns"),
    [
        ("layer_norm", torch.bfloat16, 16_384),
        ("add_rms_norm", torch.float16, 16_392),
        ("add_layer_norm", torch.float32, 8_196),
        ("add_layer_norm_backward", torch.bfloat16, 8_200),
        ("cross_entropy_parts_", torch.bfloat16, 33_000),
        ("cross_entropy_parts_", torch.float16, 4_099),
        ("cross_entropy_backward_", torch.bfloat16, 4_104),
    ],
)
def test_wide_rows(name: str, dtype: torch.dtype, columns: int) -> None:
    shape = Sizes(3, 1, hidden=columns, ffn=8, vocab=columns, heads=1, head_dim=2, flat=1)
    assert errors(Emulated(multiprocessors=1), name, sample(name, dtype, shape)) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_threads_changes_nothing(name: str) -> None:
    """Results are right, and equal bit for bit: no barrier is missing where the two orders show it."""
    arguments = sample(name, torch.bfloat16, SMALL)
    assert errors(Emulated(), name, arguments) <= 1
    up, down = (results(Emulated(descending=descending), name, arguments) for descending in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(up, down, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["bias_gelu", "bias_gelu_backward"])
def test_gelu_without_a_bias(name: str, dtype: torch.dtype) -> None:
    *before, _ = sample(name, dtype, SMALL)
    assert errors(Emulated(), name, (*before, None)) <= 1


@pytest.mark.parametrize("inverse", [False, True])
def test_rotary_of_every_sample_s_own_positions(inverse: bool) -> None:
    x, _, _, _ = sample("rotary", torch.float32, SMALL)
    half = torch.randn(*x.shape[:2], 1, x.shape[-1] // 2)
    angles = torch.cat((half, half), -1)
    assert errors(Emulated(), "rotary", (x, angles.cos(), angles.sin(), inverse)) <= 1


@pytest.mark.full
@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5, 0.999, 1 - 2**-33])
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=5)
def test_the_mask_is_the_counter_s(drop: float, key: int, columns: int, seed: int) -> None:
    """Bit for bit, for sample ids of more than 32 bits and any grid."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**62), 2**62, (3,), generator=generator)
    positions = torch.randint(0, 2**40, (5,), generator=generator)
    keep = counter.keep_mask(key, ids, positions, torch.arange(columns), drop)
    found = Emulated().dropout_backward(torch.ones(5, 3, columns), ids, positions, key, drop)
    assert torch.equal(found != 0, keep)


@pytest.mark.full
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite(poison: float, dtype: torch.dtype) -> None:
    """They are in the results where the specification has them, and nowhere else."""
    rows = [
        ("layer_norm", 0, 1),
        ("rms_norm", 0, 1),
        ("layer_norm_backward", 0, 1),
        ("bias_gelu", 0, 1),
        ("bias_gelu_backward", 0, 1),
        ("bias_gelu_backward", 1, 1),
        ("swiglu", 0, 1),
        ("swiglu_backward", 1, 1),
        ("dropout_add", 0, 1),
        ("rotary", 0, 1),
        ("cross_entropy_parts_", 0, 1),
        ("cross_entropy_backward_", 2, 1),
        ("cast_", 1, 1),
    ]
    for name, place, compared in rows:
        arguments = sample(name, dtype, SMALL)
        arguments[place][(-1,) * arguments[place].dim()] = poison
        found, expected = results(Emulated(), name, arguments), truth(name, arguments)
        for a, b in list(zip(found, expected, strict=True))[:compared]:
            assert torch.equal(a.isfinite(), b.isfinite()), name
            if name != "layer_norm_backward":  # where an infinite gradient may meet another one, or not
                assert torch.equal(a.isnan(), b.isnan()), name


def test_huge_values_of_an_activation() -> None:
    """Beyond what an exponential can hold the gradient is 0 or 1, and the value x or 0."""
    x = torch.tensor([1e3, 1e13, 3e38, -1e3, -1e13, -3e38])
    ones, zeros = torch.ones(6), torch.zeros(6)
    assert torch.equal(Emulated().bias_gelu(x, None), torch.where(x > 0, x, zeros))
    assert torch.allclose(Emulated().bias_gelu_backward(ones, x, None)[0], (x > 0).float(), atol=1e-30, rtol=0)
    assert torch.equal(Emulated().swiglu(x, ones), torch.where(x > 0, x, zeros))


def test_a_part_of_the_vocabulary_that_is_all_padding() -> None:
    for dtype in DTYPES:
        logits, targets = torch.full((3, 40), -math.inf, dtype=dtype), torch.tensor([0, -1, 100])
        maxima, sums, picked = Emulated().cross_entropy_parts_(logits, targets)
        assert torch.equal(maxima, torch.full((3,), torch.finfo(dtype).min))
        assert torch.equal(sums, torch.zeros(3)) and torch.equal(picked, torch.full((3,), -math.inf))


@pytest.mark.parametrize("parts", [1, 2])
def test_cross_entropy_of_a_split_vocabulary(parts: int) -> None:
    """Forward and backward together, of each part by itself, against the loss of the whole."""
    logits, targets = torch.randn(6, 64).bfloat16() * 4, torch.randint(0, 64, (6,))
    grad = torch.randn(6)
    whole = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(whole, targets, reduction="none")
    losses.backward(grad.double())
    own = [part.contiguous() for part in logits.chunk(parts, dim=1)]
    local = [targets - 64 // parts * i for i in range(parts)]
    numbers = torch.stack([Emulated().cross_entropy_parts_(*each) for each in zip(own, local, strict=True)])
    found, log_sums = reference.cross_entropy_merge(numbers)
    for part, wanted, each in zip(own, local, numbers, strict=True):
        Emulated().cross_entropy_backward_(part, each[0], log_sums, wanted, grad)
    assert distance(found, losses.detach()) <= 1
    assert whole.grad is not None and distance(torch.cat(own, 1), whole.grad) <= 1


def test_what_a_row_becomes_does_not_depend_on_the_others() -> None:
    arguments = sample("layer_norm", torch.bfloat16, SMALL)
    whole = Emulated().layer_norm(*arguments)[0]
    assert torch.equal(Emulated(multiprocessors=1).layer_norm(arguments[0][1:2], *arguments[1:])[0], whole[1:2])


def test_sums_of_squares_do_not_depend_on_the_alignment() -> None:
    for dtype in DTYPES:
        flat = torch.randn(70_001, generator=torch.Generator().manual_seed(0)).to(dtype)
        sums = {
            Emulated(offset, multiprocessors).sums_of_squares([flat]).item()
            for offset, multiprocessors in ((0, 1), (1, 3))
        }
        assert len(sums) == 1
        assert abs(sums.pop() - math.fsum(v * v for v in flat.tolist())) <= 1e-14 * len(flat)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_value_that_is_not_finite_reaches_its_own_sum(poison: float) -> None:
    flats = [torch.ones(40_000) for _ in range(3)]
    flats[1][-1] = poison
    assert Emulated().sums_of_squares(flats).isfinite().tolist() == [True, False, True]


@pytest.mark.full
def test_sums_of_squares_of_more_tensors_than_one_launch_takes() -> None:
    """Empty ones at every place, also at both ends of a launch; each sum has the bits that it has alone."""
    generator, sizes = torch.Generator().manual_seed(0), [0, 1, 40_000, 0, 32_768, 7, 0, 32_769]
    flats = [torch.randn(sizes[i % len(sizes)], generator=generator) for i in range(3 * 128 - 1)]
    alone = {i: Emulated().sums_of_squares([flat]) for i, flat in enumerate(flats[:8])}
    found = Emulated().sums_of_squares([*flats, *flats[:8]])
    assert all(torch.equal(found[i : i + 1], total) for i, total in alone.items())
    assert torch.equal(found[:8], found[-8:])
    expected = torch.stack([flat.double().square().sum() for flat in flats])
    assert torch.allclose(found[:-8], expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide_gradients", [True, False])
def test_adamw_gives_the_bits_of_torch(low: torch.dtype, wide_gradients: bool) -> None:
    """Of its fused kernel, over three updates; the published parameters are the masters, rounded as torch rounds."""
    ours = list(sample("adamw_", low, Sizes(1, 1, 1, 1, 1, 1, 2, flat=1 << 12)))
    ours[1] = ours[1] if wide_gradients else ours[1].to(low)
    theirs = [each.clone() for each in ours[:8]]
    for _ in range(3):
        Emulated().adamw_(*ours)
        master, grad, first, second, _, step, divide_by, skip = theirs
        grads = [grad.float().clone()]
        torch_adamw(
            *([master], grads, [first], [second], [], [step]),
            fused=True,
            grad_scale=divide_by,
            found_inf=skip,
            amsgrad=False,
            maximize=False,
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
        )
    for place in (0, 2, 3, 5):
        assert torch.equal(ours[place], theirs[place])
    assert torch.equal(ours[4], theirs[0].to(low))


def test_adamw_that_is_skipped_changes_nothing() -> None:
    arguments = list(sample("adamw_", torch.bfloat16, SMALL))
    arguments[6], arguments[7] = torch.tensor(math.inf), torch.tensor(1.0)
    before = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
    Emulated().adamw_(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments[:8], before[:8], strict=True))


# ---- more than 2^31 elements: memory that exists only where it is touched, and the last blocks of a grid

ROWS, COLUMNS = 65_600, 32_768  # 2^31 and 2 million more
FLAT = ROWS * COLUMNS
TAIL = 4  # rows


def sparse(numel: int, dtype: torch.dtype) -> Tensor:
    size = numel * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)


def last_blocks(name: str, blocks: int, total: int, *arguments: Tensor | Own | Written | float | None) -> None:
    """A launcher of which only the last blocks run; a launcher that starts two grids runs none of the second's."""
    emulated = Emulated(multiprocessors=1 << 20)
    configure = Emulated.configure
    try:
        Emulated.configure = lambda self: configure(self, total - blocks, total)  # type: ignore[method-assign]
        emulated.call(name, *arguments)
    finally:
        Emulated.configure = configure  # type: ignore[method-assign]


def big(fill: Tensor) -> Tensor:
    """A matrix [ROWS, COLUMNS] whose last rows are `fill`."""
    memory = sparse(FLAT, fill.dtype)
    memory.view(ROWS, COLUMNS)[-TAIL:] = fill
    return memory


def tail(memory: Tensor) -> Tensor:
    return memory.view(ROWS, COLUMNS)[-TAIL:]


BF16, ROW_BLOCKS = 1, ROWS // 4 * (COLUMNS // 2048)  # a tile: 4 rows of 2,048 elements


def _gelu(x: Tensor, y: Tensor) -> Tensor:
    last_blocks("bias_gelu", 16, ROW_BLOCKS, BF16, Own(x), None, Own(y), ROWS, COLUMNS)
    return reference.bias_gelu(tail(x).double(), None)


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    last_blocks("swiglu", TAIL * COLUMNS // 4096, FLAT // 4096, BF16, Own(x), Own(x), Own(y), FLAT)
    return reference.swiglu(tail(x).double(), tail(x).double())


def _dropout(x: Tensor, y: Tensor) -> Tensor:
    ids, positions = torch.arange(2), torch.arange(ROWS // 2)
    last_blocks("dropout_backward", 16, ROW_BLOCKS, BF16, Own(x), Own(y), ids, positions, KEY, DROP, ROWS, 2, COLUMNS)
    grad = tail(x).double().view(2, 2, COLUMNS)
    return reference.dropout_backward(grad, ids, positions[-2:], KEY, DROP).view(TAIL, COLUMNS)


def _norm(x: Tensor, y: Tensor) -> Tensor:
    weight, rstd = torch.ones(COLUMNS, dtype=torch.bfloat16), Own(torch.empty(ROWS))
    arguments = (Own(x), None, weight, None, None, Own(y), None, rstd, ROWS, COLUMNS, 1e-5)
    last_blocks("norm", TAIL, ROWS, BF16, 1, *arguments)
    return reference.rms_norm(tail(x).double(), weight.double(), 1e-5)[0]


def _cast(x: Tensor, y: Tensor) -> Tensor:
    last_blocks("cast_flat", TAIL * COLUMNS // 2048, FLAT // 2048, BF16, BF16, Own(y), Own(x), FLAT)
    return tail(x).double()


def _loss_gradient(x: Tensor, y: Tensor) -> Tensor:
    y.view(ROWS, COLUMNS)[-TAIL:] = tail(x)
    log_sums, targets, grad = torch.full((ROWS,), 11.0), torch.full((ROWS,), 3), torch.ones(ROWS)
    last_blocks("cross_entropy_backward", 16, ROW_BLOCKS, BF16, Own(y), log_sums, targets, grad, ROWS, COLUMNS)
    expected = (tail(x).double() - 11).exp()
    expected[:, 3] -= 1
    return expected


@pytest.mark.full
@pytest.mark.parametrize("run", [_gelu, _swiglu, _dropout, _norm, _cast, _loss_gradient])
def test_more_than_2_to_the_31_elements(run: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = big(torch.randn(TAIL, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16())
    y = sparse(FLAT, torch.bfloat16)
    expected = run(x, y)
    assert distance(tail(y), expected) <= 1


@pytest.mark.full
def test_the_last_parts_of_a_long_sum() -> None:
    flat = big(torch.randn(TAIL, COLUMNS).bfloat16())
    blocks = FLAT // (1 << 15)
    partial, total = torch.zeros(blocks, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    flats = Own(torch.tensor([flat.data_ptr()])), Own(torch.tensor([FLAT])), 1
    last_blocks("sums_of_squares", TAIL, blocks, BF16, *flats, Own(partial), Own(total))
    assert distance(partial[-TAIL:], tail(flat).double().square().sum(1)) <= 1


# ---- the emulator's own tests: what it is there to find, it finds


@pytest.mark.parametrize(
    ("which", "complaint"), [(0, "different barriers"), (1, "different barriers"), (3, "shared memory")]
)
def test_mistakes_are_found(which: int, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        Emulated().call("mistake", which, Written(poisoned(64, dtype=torch.float32)))


def test_a_missing_barrier_shows_in_the_order_of_threads() -> None:
    outputs = [Written(poisoned(64, dtype=torch.float32)) for _ in range(2)]
    for output, descending in zip(outputs, (False, True), strict=True):
        Emulated(descending=descending).call("mistake", 2, output)
    assert not torch.equal(outputs[0].tensor, outputs[1].tensor)


def test_writing_beside_a_tensor_is_found() -> None:
    with pytest.raises(AssertionError, match="outside"):
        Emulated().call("cast_flat", 0, 0, Written(torch.zeros(4)), torch.zeros(8), 8)
    with pytest.raises(AssertionError, match="to an input"):
        Emulated().call("cast_flat", 0, 0, torch.zeros(8), torch.ones(8), 8)
    assert library() is library()
