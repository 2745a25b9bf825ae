"""Places in which two configs differ."""

from typing import Any

import pytest

from megazero.config.flat import plain
from megazero.config.schema import Config, resolved
from megazero.run.history import differences

ROTARY = {"position": "rotary", "norm": "rmsnorm"}


def options(**model: Any) -> dict[str, Any]:
    return plain(resolved(Config.model_validate({"model": ROTARY | model})))


@pytest.mark.parametrize(
    ("theirs", "ours", "place"),
    [
        ({}, {"layer_kinds": {"none": {"rope": None}}}, "model.layer_kinds.none"),
        ({"layer_kinds": {"a": {}}}, {"layer_kinds": {"a": {"rope": None}}}, "model.layer_kinds.a.rope.share"),
        (
            {"layer_kinds": {"a": {"window": 8}, "b": {}}},
            {"layer_kinds": {"b": {}, "a": {"window": 8}}},
            "model.layer_pattern",
        ),
    ],
)
def test_kinds_of_blocks_that_differ_are_found(theirs: dict[str, Any], ours: dict[str, Any], place: str) -> None:
    assert place in differences(options(**theirs), options(**ours))
    assert place in differences(options(**ours), options(**theirs))
    assert not differences(options(**ours), options(**ours))
