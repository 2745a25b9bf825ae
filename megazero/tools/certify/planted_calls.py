"""Plant a fault by calling something else in place of a method of what a rank has built.

A plant names objects by a function of the rig: `units`, `block`, `optimizer`, ... A missing one (None) is a layout that
does not have it, and an error.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megazero.base.quantized import BLOCK, code_bytes
from megazero.extensions.quantized import QuantizedGathering, QuantizedSumming
from megazero.extensions.secondary import SecondShard
from megazero.optim.optimizer import Optimizer
from megazero.tools.certify.training import Plant, Rig
from megazero.zero.engine import Engine
from megazero.zero.gather import Gather
from megazero.zero.unit import Unit
from megazero.zero.unit_gradients import UnitGradients

Holders = Callable[[Rig], Iterable[object]]
Codes = QuantizedGathering | QuantizedSumming


def itself(rig: Rig) -> list[Rig]:
    """Return the rig."""
    return [rig]


def engine(rig: Rig) -> list[Engine]:
    """Return the engine of the rank."""
    return [rig.built.engine]


def optimizer(rig: Rig) -> list[Optimizer]:
    """Return the optimizer of the rank."""
    return [rig.built.engine.optimizer]


def gather(rig: Rig) -> list[Gather]:
    """Return what gathers the parameters of the rank."""
    return [rig.built.engine.gather]


def units(rig: Rig) -> list[Unit]:
    """Return all units of the rank."""
    return list(rig.built.engine.units)


def block(rig: Rig) -> list[Unit]:
    """Return the unit of the first block."""
    return [unit for unit in rig.built.engine.units if unit.layout.name == "blocks.0"]


def gradients(rig: Rig) -> list[UnitGradients]:
    """Return the gradients of all units of the rank."""
    return [unit.gradients for unit in units(rig)]


def block_gradients(rig: Rig) -> list[UnitGradients]:
    """Return the gradients of the first block."""
    return [unit.gradients for unit in block(rig)]


def loss_scale(rig: Rig) -> list[object]:
    """Return the loss scale of the rank."""
    return [rig.built.engine.loss_scale]


def pipeline(rig: Rig) -> list[object]:
    """Return the pipeline of the rank."""
    return [rig.built.pipeline]


def disks(rig: Rig) -> list[object]:
    """Return the disks of the first block."""
    return [unit.resting.paged for unit in block(rig)]


def second_shards(rig: Rig) -> list[object]:
    """Return the second shard of the first block."""
    found = (unit.parameters.gathering for unit in block(rig))
    return [gathering for gathering in found if isinstance(gathering, SecondShard)]


def of_gradients(rig: Rig) -> list[QuantizedSumming]:
    """Return what makes codes of the first block's gradients."""
    found = (unit.gradients.summing for unit in block(rig))
    return [summing for summing in found if isinstance(summing, QuantizedSumming)]


def of_parameters(rig: Rig) -> list[QuantizedGathering]:
    """Return what makes codes of the first block's parameters."""
    found = (unit.parameters.gathering for unit in block(rig))
    plain = (gathering.far if isinstance(gathering, SecondShard) else gathering for gathering in found)
    return [gathering for gathering in plain if isinstance(gathering, QuantizedGathering)]


def instead(holders: Holders, method: str, wrong: Callable[..., Any]) -> Plant:
    """Return the fault that calls `wrong(holder, right, *arguments)` instead of a method `right(*arguments)`."""

    def plant(rig: Rig) -> None:
        found = list(holders(rig))
        assert found and None not in found, f"the layout has nothing with the method {method}"
        for holder in found:
            object.__setattr__(holder, method, partial(wrong, holder, getattr(holder, method)))  # frozen ones too

    return plant


def before(holders: Holders, method: str, wrong: Callable[..., Any]) -> Plant:
    """Return the fault that calls `wrong(holder, *arguments)` before each call of a method."""

    def both(holder: object, right: Callable[..., Any], *given: Any, **options: Any) -> Any:
        wrong(holder, *given)
        return right(*given, **options)

    return instead(holders, method, both)


def after(holders: Holders, method: str, wrong: Callable[..., Any]) -> Plant:
    """Return the fault that calls `wrong(holder, *arguments, **options)` after each call of a method."""

    def both(holder: object, right: Callable[..., Any], *given: Any, **options: Any) -> Any:
        done = right(*given, **options)
        wrong(holder, *given, **options)
        return done

    return instead(holders, method, both)


def in_codes(holders: Callable[[Rig], Sequence[Codes]], operation: str, wrong: Callable[..., None]) -> Plant:
    """Return the fault that calls `wrong(right, *arguments)` instead of an operation of what makes codes."""

    def plant(rig: Rig) -> None:
        for quantizer in holders(rig):
            ops = replace(quantizer.ops, **{operation: partial(wrong, getattr(quantizer.ops, operation))})
            quantizer.ops = ops

    return plant


def scales_of(codes: Tensor, numel: int, bits: int) -> Tensor:
    """Return the scales, fp32, that follow the codes of so many values."""
    return codes[code_bytes(numel, bits) :][: 4 * -(-numel // BLOCK)].view(torch.float32)
