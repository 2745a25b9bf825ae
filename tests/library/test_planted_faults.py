"""The comparison with one process finds what can go wrong: each fault is planted, and no longer equal."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megazero.library import row_groups
from megazero.library.calls import _Call
from megazero.zero.saved import SavedPlace
from megazero.zero.unit_gradients import UnitGradients
from tests.library.odd_modules import of_numbers
from tests.library.running import on_ranks, sharded_case
from tests.library.test_tables import ADAGRAD
from tests.library.test_tables import plain as plain_tables
from tests.library.test_tables import trained as trained_tables

STEPS = 2


def lost_gradient(honest: Callable[..., None]) -> Callable[..., None]:
    """Lose the gradient of one parameter of each call."""
    return lambda call, gradients: honest(call, (None, *gradients[1:]))


def lost_sum(honest: Callable[..., Any]) -> Callable[..., Any]:
    """Lose the sum of one unit."""

    def start(gradients: UnitGradients, *, accumulate: bool) -> Any:
        pending = honest(gradients, accumulate=accumulate)
        return pending.then(lambda: gradients.own.zero_()) if gradients._layout.name == "blocks.1" else pending

    return start


def other_place(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Read what was saved of a parameter from its neighbour's place."""
    return lambda saved: honest(saved).roll(1)


def kept_gradients(honest: Callable[..., None]) -> Callable[..., None]:
    """Count what has been reduced once for each rank when it is reduced again."""
    return lambda unit: None


def early(honest: Callable[..., None]) -> Callable[..., None]:
    """Reduce a part when the first of several calls has had its gradients."""

    def deliver(call: _Call, gradients: Any) -> None:
        if len(call.part.open) > 1:
            later = set(call.part.open)
            call.part.open.clear()
            call.calls.complete(call.part)
            call.calls.reduced.clear()
            call.part.open |= later
        honest(call, gradients)

    return deliver


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], int, str]] = {
    "a parameter's gradient is lost": (_Call, "deliver", lost_gradient, 0, "plain"),
    "a unit's summed gradients are lost": (UnitGradients, "start_reduce", lost_sum, 2, "plain"),
    "backward reads another place of a parameter": (SavedPlace, "view", other_place, 3, "plain"),
    "gradients are counted twice": (UnitGradients, "keep_own", kept_gradients, 0, "plain"),
    "a part is reduced before its last gradient": (_Call, "deliver", early, 3, "twice"),
}


def trained(case: str, stage: int, fault: str | None) -> dict[str, Tensor]:
    sharded = sharded_case(case, stage, clip=0.5)

    def train() -> None:
        for step in range(STEPS):
            for micro in range(2):
                sharded.backward(of_numbers(sharded, 2 * step + micro, sharded.rank) / 2)
            sharded.step()

    if fault is None:
        train()
    else:
        owner, name, plant, _, _ = FAULTS[fault]
        with patch.object(owner, name, plant(getattr(owner, name))):
            train()
    return sharded.full_state_dict()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_step_is_found(fault: str):
    *_, stage, case = FAULTS[fault]
    honest, planted = (on_ranks(2, trained, case, stage, one)[0] for one in (None, fault))
    assert not all(torch.allclose(planted[n], values, rtol=1e-9, atol=1e-10) for n, values in honest.items())


def wrong_owner(honest: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Send the gradients of rows in another order than their ids."""

    def exchange(rows: Tensor, counts: Any, axis: Any, purpose: str) -> Tensor:
        return honest(rows.flip(0) if purpose == "row gradients" else rows, counts, axis, purpose)

    return exchange


def trained_on_rows(plant: Callable[[Any], Any] | None) -> tuple[dict[str, Tensor], list[float]]:
    if plant is None:
        return trained_tables(1, ADAGRAD, 0.05, True)
    with patch.object(row_groups, "exchange_rows", plant(row_groups.exchange_rows)):
        return trained_tables(1, ADAGRAD, 0.05, True)


def test_a_gradient_at_another_row_is_found():
    expected, _ = plain_tables(ADAGRAD, 0.05, 2)
    for plant, right in ((None, True), (wrong_owner, False)):
        found, _ = on_ranks(2, trained_on_rows, plant)[0]
        close = [torch.allclose(found[n], values, rtol=1e-11, atol=1e-12) for n, values in expected.items()]
        assert all(close) == right
