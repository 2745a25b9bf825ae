"""Precisions, errors on the way, parts called alone, hybrid sharding; all stages compute the same bits."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.comm.host import Host
from megazero.library import tiers
from tests.library.odd_modules import Stack, made, numbers, of_numbers
from tests.library.running import ADAMW, STAGES, on_ranks, plain, sharded_case, train

STEPS = 3


def in_precision(stage: int, precision: str | None) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage, precision=precision, clip=0.5)
    train(sharded, "plain", steps=STEPS)
    return sharded.full_state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", None])
def test_precisions(precision: str | None):
    """On two ranks all stages have the same bits, whatever the precision."""
    first, *others = (on_ranks(2, in_precision, stage, precision)[0] for stage in range(4))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: torch.float64}[precision]
    assert all(value.dtype == dtype for value in first.values())


def test_16_bit_parameters_have_masters():
    """One rank against bf16 parameters with fp32 masters by hand."""
    sharded = sharded_case("plain", 3, precision="bf16")
    train(sharded, "plain", steps=STEPS)
    module, masters = made("plain").bfloat16(), [p.detach().float().clone() for p in made("plain").parameters()]
    optimizer = torch.optim.AdamW(masters, **ADAMW)  # type: ignore[arg-type]
    for step in range(STEPS):
        loss = module(numbers(step, 0).bfloat16()).square().mean()
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, module.parameters(), strict=True):
                parameter.copy_(master)
    found = sharded.full_state_dict()
    for name, value in module.state_dict().items():  # the last bit of a bf16: 2^-8
        assert torch.allclose(found[name].float(), value.float(), rtol=2**-7, atol=1e-6), name


def test_an_overflow_is_skipped_and_training_goes_on():
    sharded = sharded_case("plain", 2, precision="fp16")
    sharded.backward(of_numbers(sharded, 0, 0) * 1e4)
    before = sharded.full_state_dict()
    assert sharded.step().skipped
    assert all(torch.equal(before[name], value) for name, value in sharded.full_state_dict().items())
    sharded.backward(of_numbers(sharded, 0, 0))
    assert not sharded.step().skipped


def test_what_is_not_finite_is_skipped_in_any_precision():
    sharded = sharded_case("plain", 1)
    for factor, skipped in ((float("nan"), True), (1.0, False)):
        sharded.backward(of_numbers(sharded, 0, 0) * factor)
        assert sharded.step().skipped == skipped


def after_an_error(stage: int) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage, clip=0.5)
    block = sharded.module.get_submodule("blocks.2.linear")
    handle = block.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("planted")))
    with pytest.raises(RuntimeError, match="planted"):
        of_numbers(sharded, 0, sharded.rank)
    handle.remove()
    train(sharded, "plain", steps=STEPS)
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_error_in_a_forward_leaves_nothing(stage: int):
    expected, _ = plain("plain", 2)
    found, *_ = on_ranks(2, after_an_error, stage)
    assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-13) for name, value in expected.items())


def alone(stage: int) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage)
    stack = sharded.module
    assert isinstance(stack, Stack)
    sharded.backward(stack.blocks[1](numbers(0, sharded.rank)).square().mean())
    sharded.step()
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_submodule_can_be_called_alone(stage: int):
    module = made("plain")
    assert isinstance(module, Stack)
    for rank in range(2):
        (module.blocks[1](numbers(0, rank)).square().mean() / 2).backward()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    torch.optim.AdamW(module.parameters(), **ADAMW).step()  # type: ignore[arg-type]
    found, *_ = on_ranks(2, alone, stage)
    assert all(torch.allclose(found[n], value, rtol=1e-12, atol=1e-13) for n, value in module.state_dict().items())


def hybrid(stage: int) -> tuple[dict[str, Tensor], int]:
    sharded = sharded_case("plain", stage, shard_ranks=2, clip=0.5)
    for step in range(STEPS):  # two micro-batches that nobody tells apart
        for micro in range(2):
            sharded.backward(of_numbers(sharded, 2 * step + micro, sharded.rank) / 2)
        sharded.step()
    return sharded.full_state_dict(), sharded.memory()["optimizer"]["now"]


@pytest.mark.parametrize("stage", STAGES)
def test_hybrid_sharding(stage: int):
    module = made("plain")
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(4):
                (of_numbers(module, 2 * step + micro, rank) / 8).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    (found, held), *_ = on_ranks(4, hybrid, stage)
    assert all(torch.allclose(found[n], value, rtol=1e-12, atol=1e-13) for n, value in module.state_dict().items())
    assert held == 2 * 8 * 352 // (2 if stage else 1)


def offloaded(stage: int, offload: Any, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with patch.object(tiers, "Host", partial(Host, apart=True)):  # as beside a GPU: every copy is made
        sharded = sharded_case("frozen", stage, offload=offload, optimizer=optimizer, clip=0.5)
        for step in range(STEPS):
            for micro in range(2):
                sharded.backward(of_numbers(sharded, 2 * step + micro, sharded.rank) / 2)
            sharded.step()
    return sharded.full_state_dict(), sharded.memory()


@pytest.mark.parametrize("optimizer", [{"name": "adamw", **ADAMW}, partial(torch.optim.SGD, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (3, "cpu"),
        *(pytest.param(*o, marks=pytest.mark.full) for o in ((1, {"optimizer": "cpu"}), (3, {"parameters": "cpu"}))),
    ],
)
def test_offload_changes_no_bit(stage: int, offload: Any, optimizer: Any):
    (expected, _), *_ = on_ranks(2, offloaded, stage, None, optimizer)
    (found, held), *_ = on_ranks(2, offloaded, stage, offload, optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    there = {category for category, bytes_ in held.items() if category.startswith("host_") and bytes_["now"]}
    on_host = {"optimizer", "parameters"} if offload == "cpu" else set(offload)
    assert {f"host_{kind}" for kind in on_host} <= there


def test_the_face_of_the_package_is_lazy():
    assert megazero.shard.__name__ == "shard" and megazero.Sharded.__name__ == "Sharded"
    with pytest.raises(AttributeError, match="no attribute 'sharding'"):
        _ = megazero.sharding  # type: ignore[attr-defined]
