"""The contract of models: ours keeps to it, and a model of a few lines that keeps to it trains on the engine."""

import inspect
import math
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.builders.assemble import build_engine
from megazero.builders.units import resources_of
from megazero.comm.grid import Axis, single
from megazero.comm.ledger import Ledger
from megazero.comm.regions import Region
from megazero.kernels.operations import REFERENCE
from megazero.model import contract
from megazero.model.batch_context import BatchContext
from megazero.model.embedding import Lookup
from megazero.model.linear import ColumnProducts
from megazero.model.parameter import declaration_of, declare
from megazero.model.tape import apply
from megazero.optim.elements import Settings
from megazero.optim.groups import Groups
from megazero.zero.placement import STAGES, Precision, UnitAxes
from tests.model.small import GPT, LLAMA, batch, make, step_of

VOCAB, ROWS, LR = 13, 2, 1e-2
CPU = torch.device("cpu")


class Bigram(nn.Module):
    """Two layers, each with one weight: a table, and a projection to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = declare((VOCAB, 8), std=0.5, decay=True, axis=Axis("tensor"))
        self.out = declare((VOCAB, 8), std=0.5)
        self.layers: list[contract.Layer] = [
            lambda tokens, step: apply(Lookup({"weight": self.table}), tokens, None),
            lambda x, step: self.losses(apply(self.product(), x.flatten(0, 1))[0], step.targets_SB),
        ]

    def product(self) -> ColumnProducts:
        return ColumnProducts(Region(Axis("tensor"), False, "out"), {"weight": self.out})

    def units(self) -> list[contract.UnitDeclaration]:
        return [(name, [(name, parameter)]) for name, parameter in self.named_parameters()]

    def units_of_layers(self) -> list[list[str]]:
        return [["table"], ["out"]]

    def materialise(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parameter.declaration = declaration_of(getattr(self, name))  # type: ignore[attr-defined]
            setattr(self, name, parameter)

    def forward_layers(self, parts: range, x: Tensor, step: BatchContext) -> Tensor:
        for i in parts:
            x = self.layers[i](x, step)
        return x

    def losses(self, logits_NV: Tensor, targets_SB: Tensor) -> Tensor:
        return F.cross_entropy(logits_NV, targets_SB.flatten(), reduction="none").view(targets_SB.shape)


def losses(model: contract.Model, tokens: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    return model.forward_layers(range(len(model.layers)), tokens, step_of(ROWS).scored(targets, valid))


def windows() -> tuple[Tensor, Tensor, Tensor]:
    tokens, targets, valid = batch(GPT, ROWS)
    return tokens % VOCAB, targets % VOCAB, valid


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_of_a_few_lines_trains_one_step(stage: int) -> None:
    """Each weight as by torch's own AdamW on the gradients that autograd leaves in `.grad`."""
    twin, model = Bigram(), Bigram()
    twin.materialise({n: nn.Parameter(initial(p, n).view(p.shape)) for n, p in twin.named_parameters()})
    losses(twin, *windows()).mean().backward()
    theirs = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 * declaration_of(p).decay} for p in twin.parameters()], lr=LR
    )
    theirs.step()
    engine = build_engine(
        model,
        [range(2)],
        seed=0,
        axes=lambda unit: UnitAxes(Axis("shard"), Axis("tensor"), STAGES[stage]),
        grid=single(),
        resources=resources_of(Precision(torch.float64, torch.float64), CPU, Ledger()),
        groups=Groups("adamw", 0.1),
        settings=Settings((0.9, 0.999)),
        clip=0.0,
        tokens_per_step=ROWS * GPT.seq_len,
        update_ops=REFERENCE,
    )
    slots: list[contract.GradientSlot] = [slot for unit in engine.units for slot in unit.gradients.views.values()]
    assert slots == [parameter.gradient_slot for parameter in model.parameters()]
    tokens, targets, valid = windows()
    engine.begin_step()
    engine.stages[0].forward(0)
    loss = engine.loss(losses(model, tokens, targets, valid), valid)
    engine.stages[0].backward(0, loss.backward, reduce=True, last=True)
    engine.stages[0].finish_reduction()
    result = engine.finish_step(LR)
    assert result.finite and not result.skipped
    for name, parameter in engine.named_parameters():
        assert torch.allclose(parameter, twin.get_parameter(name), rtol=1e-12, atol=1e-12), name


def initial(parameter: nn.Parameter, name: str) -> Tensor:
    declaration = declaration_of(parameter)
    return declaration.initial(0, name, 0, math.prod(declaration.local_shape))


@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_our_model_keeps_to_the_contract(shape) -> None:
    """By its names; that the types fit, pyright sees where a function takes a `Model`."""
    model: contract.Model = make(shape, torch.float32)
    promised = {name for name, _ in inspect.getmembers(contract.Model, inspect.isfunction) if not name.startswith("_")}
    assert {"units", "forward_layers"} <= promised and all(callable(getattr(model, name)) for name in promised)
    names = [name for name, _ in model.units()]
    of_layers = model.units_of_layers()
    assert len(of_layers) == len(model.layers) and {name for used in of_layers for name in used} == set(names)
    assert (contract.TIED in names) == shape.tie_embeddings
