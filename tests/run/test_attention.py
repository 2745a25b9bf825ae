"""The choice of attention on a GPU, with stand-ins for what torch and the GPU say; none is here."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero.config.schema import Config, resolved
from megazero.model.attention import VariableLength
from megazero.plan.model import Kind
from megazero.run import attention
from megazero.run.attention import (
    AttentionChoice,
    Heads,
    Probe,
    choose_attention,
    repeat_bits,
    settle_attention,
    variable_length,
)
from tests.layouts import model_options
from tests.model.small import LLAMA, make

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def some_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None, scale: float
) -> Tensor:
    return q


class Said(Probe):
    """A probe that answers what it is told to.

    Args:
        takes: implementations that take the heads as they are; behind a * those that take them with repeated keys.
    """

    def __init__(self, *takes: str, cudnn: bool = True, varying: str | None = None):
        self._takes, self._cudnn, self._varying = takes, cudnn, varying

    def prefers_cudnn(self) -> bool:
        return self._cudnn

    def refusal(self, name: str, *, repeats: bool) -> str | None:
        return None if name in self._takes or (repeats and f"*{name}" in self._takes) else f"no {name} here"

    def variable_length(self, *, windows: bool) -> VariableLength:
        if self._varying is not None:
            raise RuntimeError(self._varying)
        return some_attention


ALL = ("cudnn", "flash", "efficient")


@pytest.mark.parametrize(
    ("probe", "documents", "deterministic", "expected"),
    [
        (Said(*ALL), False, False, ("cudnn", False)),
        (Said(*ALL), False, True, ("flash", False)),  # cuDNN's backward adds in any order
        (Said(*ALL), True, False, ("flash", False)),  # and it would plan each length of a document anew
        (Said(*ALL, cudnn=False), False, False, ("flash", False)),
        (Said("efficient"), False, False, ("efficient", False)),
        (Said("*efficient"), False, False, ("efficient", True)),  # fp32 with grouped queries: never by math
        (Said("efficient", "*flash"), False, False, ("efficient", False)),
        (Said(), False, False, ("math", False)),
    ],
)
def test_one_implementation_is_chosen(
    probe: Said, documents: bool, deterministic: bool, expected: tuple[str, bool]
) -> None:
    choice = choose_attention(probe, documents=documents, windows=False, deterministic=deterministic)
    assert (choice.name, choice.repeats) == expected
    assert (choice.variable_length is some_attention) == documents


def test_math_is_never_silent() -> None:
    why = choose_attention(Said(), documents=False, windows=False, deterministic=False).why
    assert "S^2" in why and all(f"{name}: no {name} here" in why for name in ALL)
    assert not choose_attention(Said("flash"), documents=True, windows=False, deterministic=False).why


def test_documents_without_variable_lengths_say_so() -> None:
    how = {"documents": True, "windows": False, "deterministic": False}
    choice = choose_attention(Said("efficient", varying="only 16 bits"), **how)
    assert choice.variable_length is None and choice.name == "efficient"
    assert choice.why == "documents are computed length by length: only 16 bits"
    both = choose_attention(Said("efficient", varying="only 16 bits"), **how | {"windows": True}).why
    assert both == "documents are computed length by length, windows in blocks: only 16 bits"


def test_windows_in_blocks_need_an_implementation_that_takes_masks() -> None:
    how = {"documents": False, "windows": True, "deterministic": False}
    choice = choose_attention(Said(*ALL[:2], "*efficient", varying="needs torch 2.11"), **how)
    assert (choice.name, choice.repeats, choice.variable_length) == ("efficient", True, None)
    assert choose_attention(Said(*ALL[:2], varying="needs torch 2.11"), **how).name == "math"


@pytest.mark.parametrize(("cap", "expected"), [(None, " (windows: variable-length flash)"), (5.0, "")])
def test_windows_without_documents_take_it_too(
    cap: float | None, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But scores with a cap are computed in blocks."""
    monkeypatch.setattr(attention, "Probe", lambda *_: Said("flash"))
    shape = replace(LLAMA, kinds=(Kind(4), Kind()), attention_cap=cap)
    asked = resolved(Config.model_validate({"model": model_options(shape)}))
    model = make(shape, torch.float32)
    with caplog.at_level("INFO", logger="megazero"):
        settle_attention(asked, model, GPU, first=True)
    assert [record.message for record in caplog.records] == [f"attention: flash{expected}"]
    taken = None if cap else some_attention
    assert [block.attention.variable_length for block in model.blocks] == [taken, taken]


def enabled() -> tuple[bool, bool, bool, bool]:
    """Whether torch may take cudnn, flash, efficient, math."""
    cuda = torch.backends.cuda
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


@pytest.fixture(autouse=True)
def torch_s_own() -> Iterator[None]:
    """Put back what torch has for the whole process."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    before = enabled()
    yield
    cuda = torch.backends.cuda
    for enable, was in zip(
        (cuda.enable_cudnn_sdp, cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp),
        before,
        strict=True,
    ):
        enable(was)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def config(**run: object) -> Config:
    shape = {name: getattr(LLAMA, name) for name in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq_len")}
    return resolved(Config.model_validate({"model": shape, "run": run, "data": {"mask_eod": True}}))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_on_a_gpu_gets_it(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys
) -> None:
    monkeypatch.setattr(attention, "Probe", lambda *_: Said("*efficient"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    model = make(LLAMA, torch.float32)
    with caplog.at_level("INFO", logger="megazero"):
        repeat_bits(config(deterministic=deterministic), GPU)
        settle_attention(config(deterministic=deterministic), model, GPU, first=True)
    assert all(block.attention.repeats for block in model.blocks)
    assert all(block.attention.variable_length is some_attention for block in model.blocks)
    said = "attention: efficient with repeated keys (documents: variable-length flash)"
    said += ", deterministic" * deterministic
    assert [record.message for record in caplog.records] == [said] and capsys.readouterr().err == ""
    assert enabled() == (False, False, True, False)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == deterministic


def test_a_cpu_has_one_and_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(attention, "choose_attention", None)
    model = make(LLAMA, torch.float32)
    repeat_bits(config(deterministic=True), CPU)
    settle_attention(config(deterministic=True), model, CPU, first=True)
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cuda.math_sdp_enabled()
    assert not any(block.attention.repeats or block.attention.variable_length for block in model.blocks)
    assert not caplog.records


Given = dict[str, object]


def of_2_10(given: Given) -> Callable[..., Tensor]:
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, return_aux=None):
        given.update(bounds=(cu_q, cu_k), most=(max_q, max_k), causal=is_causal, grouped=True)
        return q

    return varlen_attn


def of_2_11(given: Given) -> Callable[..., Tensor]:
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
        given.update(bounds=(cu_q, cu_k), most=(max_q, max_k), causal=window_size == (-1, 0), grouped=True)
        return q

    return varlen_attn


def of_2_13(given: Given) -> Callable[..., Tensor]:
    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        given.update(bounds=(cu_q, cu_k), most=(max_q, max_k), causal=window_size == (-1, 0), grouped=enable_gqa)
        return q

    return varlen_attn


@pytest.mark.parametrize("version", [of_2_10, of_2_11, of_2_13])
def test_every_version_of_torch_is_called_as_it_wants(
    version: Callable[[Given], Callable[..., Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Given = {}
    module = ModuleType("torch.nn.attention.varlen")
    vars(module)["varlen_attn"] = version(given)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    q, bounds = torch.zeros(8, 4, 16), torch.tensor([0, 3, 8])
    variable_length(True)(q, q, q, bounds, 5, None, 0.25)
    assert given == {"bounds": (bounds, bounds), "most": (5, 5), "causal": True, "grouped": True}


def test_windows_and_scales_of_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 has neither: the scale is multiplied into the queries, and a window is refused."""
    given: Given = {}
    module = ModuleType("torch.nn.attention.varlen")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    q, bounds = torch.ones(8, 4, 16), torch.tensor([0, 3, 8])

    def new(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        given.update(scale=scale, window=window_size)
        return q

    vars(module)["varlen_attn"] = new
    variable_length(False)(q, q, q, bounds, 5, 3, 0.5)
    assert given == {"scale": 0.5, "window": (2, 0)}
    vars(module)["varlen_attn"] = of_2_10({})
    assert torch.equal(variable_length(False)(q, q, q, bounds, 5, None, 0.5), 2 * q)
    with pytest.raises(ValueError, match=r"torch 2\.11"):
        variable_length(False)(q, q, q, bounds, 5, 3, 0.5)


def test_the_installed_torch_knows_the_call() -> None:
    """Shapes and options alone: no kernel runs."""
    with FakeTensorMode():
        q, k = (torch.empty(8, count, 16, dtype=torch.bfloat16, requires_grad=True) for count in (4, 2))
        bounds = torch.empty(3, dtype=torch.int32)
        y = variable_length(True)(q, k, k, bounds, 5, 3, 0.5)
        y.sum().backward()
    assert y.shape == q.shape == q.grad.shape and k.grad.shape == k.shape


def test_why_torch_refuses_is_said() -> None:
    """Asked of tensors on a CPU, which no implementation for GPUs takes."""
    refusal = Probe(CPU, torch.float32, Heads(4, 2, 16, 8)).refusal("flash", repeats=False)
    assert refusal


def test_a_choice_is_said_in_words() -> None:
    assert str(AttentionChoice("flash", False, None, "")) == "flash"
