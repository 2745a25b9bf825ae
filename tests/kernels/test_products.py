"""Products of 16-bit matrices into fp32 memory: what torch has for a device is tried, and believed only if it is right.

No GPU is here: what stands in for torch's operations computes in fp64 on the CPU.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.kernels import reference, select
from megazero.kernels.operations import REFERENCE
from megazero.kernels.products import Product, WideProducts, wide_products
from megazero.kernels.select import choose
from megazero.tools.certify.tolerances import GRADIENT_FP32
from tests.zero.test_layout_and_unit import slot_of

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def exact(left: Tensor, right: Tensor) -> Tensor:
    return left.double() @ right.double()


def write(into: Tensor, left: Tensor, right: Tensor) -> None:
    into.copy_(exact(left, right))


def add(into: Tensor, left: Tensor, right: Tensor) -> None:
    into.copy_(into.double() + exact(left, right))


def rounding(operation: Product) -> Product:
    """Rounds what it makes to 16 bits, as a product does whose result is widened afterwards."""

    def wrong(into: Tensor, left: Tensor, right: Tensor) -> None:
        operation(into, left, right)
        into.copy_(into.to(left.dtype))

    return wrong


def overwriting(into: Tensor, left: Tensor, right: Tensor) -> None:
    """What `addmm` would do if it began by clearing the memory that it was given twice."""
    write(into.zero_(), left, right)


def missing(into: Tensor, left: Tensor, right: Tensor) -> None:
    raise NotImplementedError("Could not run 'aten::mm.dtype_out' with arguments from the 'CPU' backend")


def absent(into: Tensor, left: Tensor, right: Tensor) -> None:
    raise AttributeError("'_OpNamespace' 'aten' object has no attribute 'dtype_out'")


@DTYPES
def test_what_is_right_is_taken(dtype: torch.dtype) -> None:
    assert wide_products(CPU, dtype, write, add) == WideProducts(write, add)


@DTYPES
@pytest.mark.parametrize("wrong", [missing, absent, rounding(write), add], ids=lambda each: each.__name__)
def test_without_a_right_product_there_is_none(dtype: torch.dtype, wrong: Product) -> None:
    """`add` in the place of `write`: the memory held NaN."""
    assert wide_products(CPU, dtype, wrong, add) is None


@DTYPES
@pytest.mark.parametrize("wrong", [missing, overwriting, rounding(add)], ids=lambda each: each.__name__)
def test_a_product_that_does_not_add_in_place_has_memory_of_its_own(dtype: torch.dtype, wrong: Product) -> None:
    found = wide_products(CPU, dtype, write, wrong)
    assert found is not None and found.write is write and found.add is not wrong
    into, left, right = torch.full((3, 5), 0.5), torch.randn(3, 7).to(dtype), torch.randn(7, 5).to(dtype)
    expected = into + exact(left, right).float()
    found.add(into, left, right)
    assert torch.equal(into, expected)


def test_this_torch_has_none_for_a_cpu() -> None:
    """So nothing changes there. If this fails, a CPU has got them: look whether bits are to change."""
    assert wide_products(CPU, torch.bfloat16) is None


@DTYPES
def test_weight_gradients_are_not_rounded_on_their_way(dtype: torch.dtype) -> None:
    """Two micro-batches: the first overwrites what the memory held."""
    generator = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(size, generator=generator).to(dtype) for size in ((64, 40), (40, 24))] for _ in range(2)]
    found = {}
    for name, products in (("narrow", None), ("wide", wide_products(CPU, dtype, write, add))):
        view = slot_of("weight", replace(REFERENCE, wide_products=products))
        view.view = found[name] = torch.full((64, 24), torch.nan)
        for _ in pairs:
            view.expect()
        for left, right in pairs:
            view.add_product(left, right)
    expected = sum(exact(*pair) for pair in pairs)
    error = {name: float((value - expected).abs().max() / expected.abs().max()) for name, value in found.items()}
    assert error["wide"] < 1e-6 < 1e-4 < error["narrow"]


def test_wide_factors_and_narrow_gradients_do_without() -> None:
    def refused(*tensors: Tensor) -> None:
        raise AssertionError("factors and gradient have one dtype")

    ops = replace(REFERENCE, wide_products=WideProducts(refused, refused))
    for dtype in (torch.float32, torch.bfloat16):
        view = slot_of("weight", ops)
        view.view = torch.empty(3, 4, dtype=dtype)
        for _ in range(2):
            view.expect()
        for first in (True, False):
            view.add_product(torch.ones(3, 2, dtype=dtype), torch.ones(2, 4, dtype=dtype))
            assert view.view.eq(2 if first else 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sorted_rows_are_the_sums_of_the_specification(dtype: torch.dtype) -> None:
    """Into zeros bit for bit, because both add a row's values in their order; on top of others to rounding."""
    generator = torch.Generator().manual_seed(0)
    for tokens, vocabulary in ((1, 1), (7, 3), (500, 11), (500, 4000)):
        rows = torch.randint(vocabulary, (tokens,), generator=generator)
        values = torch.randn(tokens, 13, generator=generator).to(dtype)
        one, other = torch.zeros(vocabulary, 13), torch.zeros(vocabulary, 13)
        REFERENCE.add_rows_(one, rows, values)
        reference.add_sorted_rows_(other, rows, values)
        assert torch.equal(one, other)
        REFERENCE.add_rows_(one, rows, values)
        reference.add_sorted_rows_(other, rows, values)
        assert float((one - other).abs().max()) <= GRADIENT_FP32 * float(one.abs().max())


def test_sorted_rows_have_the_same_bits_whatever_the_threads_and_the_other_rows() -> None:
    """Each row's sum has the order of its own values: shuffling those of other rows among them changes nothing."""
    generator = torch.Generator().manual_seed(0)
    rows, values = torch.randint(50, (4000,), generator=generator), torch.randn(4000, 33, generator=generator)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(torch.zeros(50, 33))
        reference.add_sorted_rows_(found[-1], rows, values)
    torch.set_num_threads(1)
    shuffled = rows[torch.randperm(len(rows), generator=generator)].argsort(stable=True).argsort()
    order = rows.argsort(stable=True)[shuffled]  # rows come in another order, the values of each in their own
    assert not torch.equal(rows[order], rows)
    found.append(torch.zeros(50, 33))
    reference.add_sorted_rows_(found[-1], rows[order], values[order])
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_sorted_rows_are_taken_on_a_gpu_that_is_to_be_deterministic() -> None:
    gpu = torch.device("cuda")
    chosen = {
        (device.type, deterministic): choose("reference", device, torch.bfloat16, deterministic=deterministic).add_rows_
        for device in (CPU, gpu)
        for deterministic in (False, True)
    }
    assert chosen.pop(("cuda", True)) is reference.add_sorted_rows_
    assert all(each is reference.add_rows_ for each in chosen.values())


def test_products_are_tried_on_a_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not beside fp32 parameters, not for a device that is only declared, and never on a CPU, whose bits stay."""
    found = WideProducts(write, add)
    monkeypatch.setattr(select, "wide_products", lambda device, dtype: found)
    gpu = torch.device("cuda")
    assert choose("reference", gpu, torch.bfloat16).wide_products is None  # this torch sees none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose("reference", gpu, torch.bfloat16).wide_products is found
    assert choose("reference", gpu, torch.float32).wide_products is None
    assert choose("reference", gpu, torch.bfloat16, present=False).wide_products is None
    assert choose("reference", CPU, torch.bfloat16).wide_products is None
