"""Kernels prove themselves: wrong ones are found, replaced and named; a verdict is kept as long as it holds."""

import logging
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.base.errors import UserError
from megazero.kernels import cpu, proof, reference
from megazero.kernels import select as choice
from megazero.kernels.proof import Fault, compare, faults
from tests.kernels.emulated import Emulated

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
CPU = torch.device("cpu")
fused = torch.ops.megazero


class Wrong:
    """The CPU library with one operation replaced."""

    def __init__(self, name: str, operation: Callable[..., Any]):
        self._own = {name: operation}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._own.get(name) or getattr(fused, name)


def forgotten_tail(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """As a kernel that processes whole packs of eight."""
    y, *others = fused.layer_norm(x, *rest)
    y[..., x.shape[-1] // 8 * 8 :] = 0
    return y, *others


def forgotten_row(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """As a sum over rows that ends one row early."""
    grad_x, grad_weight, grad_bias = fused.layer_norm_backward(grad, x, *rest)
    return grad_x, grad_weight, grad_bias - grad.reshape(-1, grad.shape[-1])[-1]


def padded_mean(x: Tensor, weight: Tensor, *numbers: float) -> tuple[Tensor, Tensor]:
    """As a mean over the padded row."""
    return fused.rms_norm(x, weight * (-(-x.shape[-1] // 8) * 8 / x.shape[-1]) ** 0.5, *numbers)


def without_bias(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return fused.bias_gelu_backward(grad, x, None)[0], fused.bias_gelu_backward(grad, x, bias)[1]


def linear_gate(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return grad * up * gate.sigmoid(), fused.swiglu_backward(grad, gate, up)[1]


def never_absent(logits: Tensor, targets: Tensor) -> Tensor:
    return fused.cross_entropy_parts_(logits, targets.clamp(0, logits.shape[1] - 1))


def no_target(logits: Tensor, maxima: Tensor, log_sums: Tensor, targets: Tensor, grad: Tensor) -> None:
    fused.cross_entropy_backward_(logits, maxima, log_sums, torch.full_like(targets, -1), grad)


def truncated(into: Tensor, x: Tensor) -> None:
    if into.dtype == torch.bfloat16 and x.dtype == torch.float32:
        into.view(torch.int16).copy_(x.view(torch.int32) >> 16)
    else:
        fused.cast_(into, x)


def swapped_nibbles(codes: Tensor, x: Tensor, bits: int) -> None:
    fused.quantize_(codes, x, bits)
    if bits == 4:
        own = codes[: x.numel() // 2]
        own.copy_(own >> 4 | own << 4)


def too_far(into: Tensor, x: Tensor) -> None:
    fused.accumulate_(into, x)
    into.as_strided((1,), (1,), into.storage_offset() + into.numel()).fill_(0)


def on_its_own(x: Tensor, residual: Tensor, ids: Tensor, positions: Tensor, key: int, drop: float) -> Tensor:
    return fused.dropout_add(x, residual, ids, positions, key ^ 1, drop)


def overwritten(into: Tensor, x: Tensor) -> None:
    into.copy_(x)


def never_equal() -> Callable[..., Tensor]:
    calls = count()
    return lambda x, bias: fused.bias_gelu(x, bias) + next(calls) % 2 * 1e-2


def no_start(*_: object, **__: object) -> None:
    raise RuntimeError("no kernel image is available for execution on the device\nCUDA kernel errors")


def always_updates(*given: Any) -> None:
    fused.adamw_(*given[:7], torch.zeros(()), *given[8:])


def not_divided(*given: Any) -> None:
    fused.adamw_(*given[:6], torch.ones(()), *given[7:])


PLANTED = {
    "a tail": ("layer_norm", forgotten_tail),
    "a row": ("layer_norm_backward", forgotten_row),
    "a padded mean": ("rms_norm", padded_mean),
    "no offset": ("add_rms_norm", lambda x, more, weight, eps, *_: fused.add_rms_norm(x, more, weight, eps)),
    "no offset backward": ("layer_norm_backward", lambda *given: fused.layer_norm_backward(*given[:5])),
    "the other GELU": ("bias_gelu", lambda x, bias: F.gelu(x if bias is None else x + bias)),
    "no bias": ("bias_gelu_backward", without_bias),
    "rows of one block": ("sum_rows_", lambda into, x, add: fused.sum_rows_(into, x[:4], add)),
    "never added": ("sum_rows_", lambda into, x, add: fused.sum_rows_(into, x, False)),
    "a derivative": ("swiglu_backward", linear_gate),
    "no scale": ("dropout_backward", lambda *given: fused.dropout_backward(*given) * 0.9),
    "another mask": ("dropout_add", on_its_own),
    "never inverse": ("rotary", lambda x, cos, sin, inverse: fused.rotary(x, cos, sin, False)),
    "targets elsewhere": ("cross_entropy_parts_", never_absent),
    "no target": ("cross_entropy_backward_", no_target),
    "not skipped": ("adamw_", always_updates),
    "not divided": ("adamw_", not_divided),
    "truncated": ("cast_", truncated),
    "overwritten": ("accumulate_", overwritten),
    "out of bounds": ("accumulate_", too_far),
    "nibbles": ("quantize_", swapped_nibbles),
    "not added": ("dequantize_", lambda into, codes, bits, add: fused.dequantize_(into, codes, bits, False)),
    "one tensor": ("sums_of_squares", lambda flats: fused.sums_of_squares(flats[:1]).expand(len(flats)).clone()),
    "NaN lost": ("swiglu", lambda gate, up: fused.swiglu(gate.nan_to_num(0.0), up)),
    "a race": ("bias_gelu", never_equal()),
    "no start": ("rms_norm_backward", no_start),
}


@pytest.fixture(scope="module", autouse=True)
def library() -> Path:
    return cpu.load()


@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_kernel_is_found(planted: str) -> None:
    name, operation = PLANTED[planted]
    found = list(compare(Wrong(name, operation), CPU))
    assert {fault.operation for fault in found} == {name}, found
    dtypes = {fault.dtype for fault in found}
    assert dtypes == ({"float32", "bfloat16"} if planted == "truncated" else {"float32", "bfloat16", "float16"})


def test_the_kernels_of_the_cpu_are_right() -> None:
    assert list(compare(fused, CPU)) == []


@pytest.mark.full
@pytest.mark.parametrize("dtype", proof.DTYPES)  # one at a time: emulated sums over wide rows take 40 s
def test_the_kernels_of_a_gpu_are_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "DTYPES", (dtype,))
    assert list(compare(Emulated(multiprocessors=2, descending=dtype == torch.float32), CPU)) == []


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A fresh cache for verdicts; a call of `compare` adds 1 to the list, and finds swiglu in bf16 wrong."""
    calls: list[int] = []

    def compare(implementation: object, device: torch.device) -> Iterator[Fault]:
        calls.append(1)
        yield Fault("swiglu", "bfloat16", "its error is 7 times the allowed one")

    monkeypatch.setattr(proof, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(proof, "compare", compare)
    return calls


def test_a_wrong_kernel_is_replaced_and_named(judged: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="megazero"):
        chosen = choice.choose("auto", CPU, torch.bfloat16)
    said = "kernels: swiglu in bfloat16 is wrong on this cpu: its error is 7 times the allowed one; plain torch takes"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(said)
    assert chosen.name == "fused; reference: swiglu"
    assert chosen.swiglu is reference.swiglu and chosen.swiglu_backward is reference.swiglu_backward
    assert chosen.rms_norm is fused.rms_norm
    assert choice.choose("fused", CPU, torch.float32).name == "fused"  # in fp32 it is right
    with pytest.raises(UserError, match=r"MZ-114 precision.kernels=fused: swiglu in bfloat16 is wrong on this cpu"):
        choice.choose("fused", CPU, torch.bfloat16)


def test_a_verdict_is_kept_as_long_as_it_holds(judged: list[int], library: Path, tmp_path: Path) -> None:
    first = faults(library, CPU)
    assert faults(library, CPU) == first == [Fault("swiglu", "bfloat16", "its error is 7 times the allowed one")]
    assert len(judged) == 1
    (kept,) = tmp_path.glob("proof-*.json")
    for content in (b"", b"[[1]", b'{"a": 1}', b"[[1, 2]]"):
        kept.write_bytes(content)
        assert faults(library, CPU) == first
    assert len(judged) == 5
    other = tmp_path / "other.so"
    other.write_bytes(b"another library")
    assert faults(other, CPU) == first and len(judged) == 6


def test_a_cache_that_cannot_be_written(
    judged: list[int], library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "cache_folder", lambda: tmp_path / "a file" / "folder")
    (tmp_path / "a file").touch()
    assert len(faults(library, CPU)) == len(faults(library, CPU)) == 1 and len(judged) == 2


def test_a_library_of_which_nothing_works_is_not_used(
    judged: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "compare", lambda *_: (Fault(name, "float32", "no image") for name in proof.SAMPLES))
    with caplog.at_level(logging.INFO, logger="megazero"):
        assert choice.choose("auto", CPU, torch.float32).name == "reference"
    assert caplog.messages[0].startswith("kernels: reference (none of the kernels works (no image); to build them")
    with pytest.raises(UserError, match=r"MZ-114 .*none of the kernels works"):
        choice.choose("fused", CPU, torch.float32)


def test_a_broken_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ones", no_start)
    with pytest.raises(UserError, match=r"MZ-114 .*an operation broke the device: rms_norm_backward in torch.float32"):
        list(compare(Wrong("rms_norm_backward", no_start), CPU))
