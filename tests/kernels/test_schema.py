"""Schemas, what they say of tensors without data, and the specification agree; no compiler is needed for that."""

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero.kernels import reference, schema
from megazero.kernels.samples import SAMPLES, Arguments, Draw, Sizes

OPERATIONS = sorted(SAMPLES)
SIZES = Sizes(sequence=5, batch=3, hidden=12, ffn=10, vocab=12, heads=2, head_dim=6, flat=20)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def sample(name: str, dtype: torch.dtype) -> Arguments:
    return SAMPLES[name](Draw(dtype, torch.Generator().manual_seed(0)), SIZES)


def test_every_operation_has_a_case_and_a_specification() -> None:
    assert set(schema.OPERATIONS) == set(OPERATIONS)
    assert all(callable(getattr(reference, name)) for name in OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
@DTYPES
def test_what_comes_out_is_what_the_specification_returns(name: str, dtype: torch.dtype) -> None:
    """In number, shape, dtype and layout."""
    arguments = sample(name, dtype)
    without_data = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), arguments)
    found = getattr(torch.ops.megazero, name)(*without_data)
    expected = getattr(reference, name)(*arguments)
    assert outline(found) == outline(expected)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_written_is_what_the_schema_says(name: str) -> None:
    """Other arguments stay as they are, and none of them is returned."""
    arguments = sample(name, torch.bfloat16)
    before = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
    returned = getattr(reference, name)(*arguments)
    described = getattr(torch.ops.megazero, name).default._schema.arguments
    for argument, now, then in zip(described, arguments, before, strict=False):
        if isinstance(now, Tensor):
            assert torch.equal(now, then) != (argument.alias_info is not None), argument.name
    memory = {each.data_ptr() for each in arguments if isinstance(each, Tensor)}
    assert not memory & {each.data_ptr() for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)}


def outline(result: object) -> list[tuple[object, ...]]:
    tensors = [each for each in pytree.tree_leaves(result) if each is not None]
    return [(each.shape, each.dtype, each.is_contiguous()) for each in tensors]
