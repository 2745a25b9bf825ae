"""torch.compile around a sharded module, before or after it is sharded, is refused; of each block it works."""

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.base.errors import UserError
from tests.library.odd_modules import Stack, made, numbers
from tests.library.running import ADAMW, on_ranks


def from_compiled(way: str, stage: int) -> str:
    """Return what came of a step of a module that is compiled in some way."""
    torch._dynamo.reset()
    module: nn.Module = made("plain")
    assert isinstance(module, Stack)
    if way == "in place":
        module.compile(backend="eager")
    if way == "a container":
        blocks = list(module.blocks)
        module.blocks.forward = lambda x: [x := block(x) for block in blocks][-1]
        module.blocks.compile(backend="eager")
        module.run = lambda stack, x: stack.blocks(x)
    if way == "before":
        module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    sharded = megazero.shard(
        module, {"name": "adamw", **ADAMW}, stage=stage, kernels="reference", units=["*blocks.[012]"]
    )
    call: Callable[[Tensor], Tensor] = sharded
    if way == "after":
        call = torch.compile(sharded, backend="eager")
    if way == "the module after":
        sharded.module.compile(backend="eager")
    if way == "a function":
        call = torch.compile(lambda x: sharded(x).tanh(), backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # torch.compile looks at it
        try:
            sharded.backward(call(numbers(0, sharded.rank)).square().mean())
        except UserError as error:
            return str(error)
    return "ran"


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize(
    "way",
    [
        *("in place", "the module after", "a function"),
        *(pytest.param(way, marks=pytest.mark.full) for way in ("a container", "before", "after")),
    ],
)
def test_what_is_compiled_around_units_is_refused(way: str, stage: int):
    for line in on_ranks(2, from_compiled, way, stage):
        assert re.search(r"MZ-510: .* torch.compile compiles; compile each block", line), line
