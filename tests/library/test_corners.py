"""Uses of a sharded module at which a first version computed wrong numbers, or hung."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero import Sharded
from megazero.base.errors import UserError
from tests.library.odd_modules import WIDTH, Stack, made, numbers, of_numbers
from tests.library.running import ADAMW, STAGES, on_ranks, plain, sharded_case, train


def of(make: Any, stage: int, **options: Any) -> Sharded:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make()
    return megazero.shard(module, {"name": "adamw", **ADAMW}, stage=stage, kernels="reference", **options)


def trained(make: Any, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    sharded = of(make, stage, **options)
    for step in range(3):
        sharded.backward(sharded(numbers(step, sharded.rank)).square().mean())
        sharded.step()
    return sharded.full_state_dict()


class Outside(nn.Module):
    """Attention reads the weight of a linear module that it never calls; so does a product here."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x[None], x[None], x[None])
        return y[0] @ self.first.weight


class Views(nn.Module):
    """Parts that return their own parameter, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(Scale() for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        views = [scale() for scale in self.scales]
        return sum((x * view).tanh() for view in views)  # type: ignore[return-value]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH))

    def forward(self) -> Tensor:
        return self.weight[:WIDTH]


class Shared(Stack):
    """Two blocks have one linear module."""

    def __init__(self) -> None:
        super().__init__()
        first, second, _ = self.blocks
        second.linear = first.linear
        self.double()


class Spectral(nn.Module):
    """Parts that look at their real parameter as complex numbers, and at their conjugates, as spectral layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Complex() for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH // 2 + 1, WIDTH // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight)
        y = torch.fft.rfft(x) @ weight
        y = y * weight[0].conj() * weight[1].conj().imag
        return torch.fft.irfft(y, n=WIDTH).tanh() * self.bias


@pytest.mark.parametrize(
    ("make", "stages", "options"),
    [(Spectral, (0, 3), {}), (Outside, (0, 1, 2), {"units": [nn.Linear]}), (Views, (0, 3), {}), (Shared, (1, 3), {})],
)
def test_parameters_in_unusual_places(make: Any, stages: tuple[int, ...], options: dict[str, Any]):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(3):
        for rank in range(2):
            (module(numbers(step, rank)).square().mean() / 2).backward()
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    for stage in stages:
        found, *_ = on_ranks(2, trained, make, stage, options)
        for name, values in module.state_dict().items():
            assert torch.allclose(found[name], values, rtol=1e-12, atol=1e-13), (stage, name)


def loaded_after_a_step(stage: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage)
    train(sharded, "plain", steps=1)
    sharded.load_state_dict(state if sharded.rank == 0 else {})
    sharded(numbers(0, 0))
    return sharded.full_state_dict(everywhere=True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_state_dict_wins_over_an_update_under_way(stage: int):
    state = {name: value + 1.0 for name, value in made("plain").state_dict().items()}
    for found in on_ranks(2, loaded_after_a_step, stage, state):
        assert all(torch.equal(found[name], value) for name, value in state.items())


def refused_elsewhere(stage: int) -> str:
    sharded = sharded_case("plain", stage)
    with pytest.raises(UserError) as caught:
        sharded.load_state_dict({})
    return str(caught.value)


def test_what_rank_0_refuses_all_refuse():
    first, second = on_ranks(2, refused_elsewhere, 1)
    assert "MZ-508" in first and "MZ-508" in second and "rank 0 failed" in second


def test_a_call_that_failed_half_way_is_not_made_again():
    module = nn.Sequential(nn.Linear(4, 4), Weight())
    with pytest.raises(UserError, match="MZ-509"):
        megazero.shard(module, "adamw", stage=3, units=["0", "1"])
    with pytest.raises(UserError, match=r"MZ-510 shard: .*sharded already"):
        megazero.shard(module, "adamw", stage=3, units=["0", "1"], initial=lambda name, tensor: tensor.zero_())


class Weight(nn.Module):
    """A module without initial values of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))


class Planted(torch.autograd.Function):
    """Fail in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("planted")


def after_a_failed_backward(stage: int) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage, clip=0.5)
    stack = sharded.module
    assert isinstance(stack, Stack)

    def failing(stack: Stack, x: Tensor) -> Tensor:
        return stack.blocks[2](Planted.apply(stack.blocks[1](stack.blocks[0](x))))

    stack.run = failing
    with pytest.raises(RuntimeError, match="planted"):
        sharded.backward(of_numbers(sharded, 5, sharded.rank))
    with pytest.raises(UserError, match=r"MZ-503.*failed"):
        sharded.step()
    stack.run = None
    train(sharded, "plain", steps=3)
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_backward_is_forgotten(stage: int):
    expected, _ = plain("plain", 2)
    found, *_ = on_ranks(2, after_a_failed_backward, stage)
    assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-13) for name, value in expected.items())


def through_the_module(stage: int) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage)
    with sharded.gathered():
        nn.init.constant_(sharded.module.get_parameter("first.weight"), 0.25)
    with pytest.raises(RuntimeError, match="planted"), sharded.gathered() as values:
        assert values["first.weight"].eq(0.25).all()
        raise RuntimeError("planted")
    with pytest.raises(UserError, match=r"MZ-502.*inside"), sharded.gathered():
        sharded(numbers(0, 0))
    train(sharded, "plain", steps=1)
    with pytest.raises(UserError, match=r"MZ-503.*last=False"):
        sharded.backward(of_numbers(sharded, 0, 0), last=False)
        sharded.gradients()
        raise UserError(503, "last=False")  # stages 2 and 3 have reduced
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_whole_values_through_the_module(stage: int):
    module = made("plain")
    nn.init.constant_(module.get_parameter("first.weight"), 0.25)
    ((of_numbers(module, 0, 0) + of_numbers(module, 0, 1)) / 2).backward()
    torch.optim.AdamW(module.parameters(), **ADAMW).step()  # type: ignore[arg-type]
    found, *_ = on_ranks(2, through_the_module, stage)
    assert all(torch.allclose(found[n], value, rtol=1e-12, atol=1e-13) for n, value in module.state_dict().items())


def changed_in_place() -> None:
    sharded = sharded_case("plain", 3)
    stack = sharded.module
    assert isinstance(stack, Stack)

    def run(stack: Stack, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        y = stack.blocks[0](hidden)
        hidden.add_(1.0)
        return y

    stack.run = run
    loss = of_numbers(sharded, 0, sharded.rank)
    with pytest.raises(UserError, match=r"MZ-506.*in place"):
        sharded.backward(loss)


def test_a_change_in_place_of_what_backward_needs_is_noticed():
    on_ranks(2, changed_in_place)


def evaluated_first(folder: Path) -> None:
    sharded = of(lambda: Masked().double(), 3)
    with torch.inference_mode():
        sharded(numbers(0, 0))
    train_masked(sharded)
    sharded.save(folder)
    sharded.load(folder)


class Masked(Stack):
    """It has a buffer with infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))


def train_masked(sharded: Sharded) -> None:
    for step in range(2):
        sharded.backward(of_numbers(sharded, step, sharded.rank))
        sharded.step()


def test_inference_first_and_buffers_with_infinities(tmp_path: Path):
    on_ranks(2, evaluated_first, tmp_path)


def tied_on_meta(stage: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        module = made("tied")
    return megazero.shard(module, "adamw", stage=stage, kernels="reference").full_state_dict(everywhere=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_shared_parameter_on_meta_is_alike_everywhere(stage: int):
    first, second = on_ranks(2, tied_on_meta, stage)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["head.weight"], first["blocks.0.linear.weight"]) and first["head.weight"].any()


def test_complex_parameters_are_refused():
    module = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(UserError, match=r"MZ-510.*complex64"):
        megazero.shard(module, "adamw", stage=0)


def other_row() -> str:
    sharded = megazero.shard(
        nn.ModuleDict({"table": nn.Embedding(5, 2), "head": nn.Linear(2, 1)}),
        "adamw",
        stage=1,
        kernels="reference",
        tables=["table"],
        precision="bf16",
    )
    table = sharded.module.get_submodule("table")
    assert table(torch.tensor([1])).dtype == torch.bfloat16
    with pytest.raises(UserError) as caught:
        table(torch.tensor([7 * sharded.rank]))
    return str(caught.value)


def test_a_row_that_is_none_stops_all_ranks():
    first, second = on_ranks(2, other_row)
    assert "MZ-511" in first and "rank 1 failed" in first and "MZ-511 rank=1" in second and "row 7" in second


def test_what_the_module_came_with_is_freed():
    module = made("tied")
    before = list(module.parameters())
    sharded = megazero.shard(module, "adamw", stage=3, kernels="reference")
    assert sharded.module is module and all(a is b for a, b in zip(before, module.parameters(), strict=True))
    units = {unit.resting.parameters.values.untyped_storage()._cdata for unit in sharded._assembly.values.units}
    with torch._C.DisableTorchFunctionSubclass():
        assert all(parameter.untyped_storage()._cdata in units for parameter in before)
