"""`precision.kernels=compile`: the specification under torch.compile computes what the specification computes."""

import shutil
from pathlib import Path

import pytest
import torch

from megazero.base.errors import UserError
from megazero.kernels import compiled, reference
from megazero.kernels.compiled import NAMES
from megazero.kernels.samples import SAMPLES, Draw, Sizes, distances, results
from megazero.kernels.select import choose

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # of torch.compile
]
CPU = torch.device("cpu")
SIZES = Sizes(5, 2, 33, 7, 50, 2, 6, 100)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_compiled_operations_are_right(name: str) -> None:
    """In fp32 within the kernels' tolerance of fp64; in bf16 no worse than the specification."""
    operation = choose("compile", CPU, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = SAMPLES[name](Draw(dtype, torch.Generator().manual_seed(0)), SIZES)
        ours = max(distances(name, arguments, results(operation, name, arguments)))
        plain = max(distances(name, arguments, results(reference, name, arguments)))
        assert ours <= max(1.0, plain), (name, dtype, ours, plain)


def test_the_choice() -> None:
    chosen = choose("compile", CPU, torch.bfloat16)
    others = ("dropout", "cross entropy", "flat", "quantized", "adamw")
    assert chosen.name == "compile" + "".join(f"; reference: {family}" for family in others)
    assert chosen.dropout_add is reference.dropout_add and chosen.swiglu is not reference.swiglu
    declared = choose("compile", torch.device("cuda"), torch.bfloat16, present=False)
    assert declared.name == chosen.name and declared.swiglu is reference.swiglu


def test_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"MZ-114 precision.kernels=compile: torch.compile needs g\+\+"):
        choose("compile", CPU, torch.float32)
    monkeypatch.setattr(compiled, "is_installed", lambda module: False)
    with pytest.raises(UserError, match=r"MZ-114 .*needs triton"):
        choose("compile", torch.device("cuda"), torch.float32)


def test_compiled_norms_round_as_often_as_the_specification() -> None:
    x, weight = (torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((64, 96), (96,)))
    operation = choose("compile", CPU, torch.bfloat16)
    for twice in (True, False):
        arguments = x.bfloat16(), weight.bfloat16(), 1e-5, 0.0, twice
        assert torch.equal(operation.rms_norm(*arguments)[0], reference.rms_norm(*arguments)[0])
