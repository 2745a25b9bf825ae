"""The table of what may change while a run lives has every option, and the sections of a stage are what it says."""

import pytest
from pydantic import ValidationError

from megazero.base.errors import UserError
from megazero.config.changes import CHANGEABLE, row_of
from megazero.config.flat import flatten, option_keys
from megazero.config.permitted import is_permitted, permitted
from megazero.config.schema import Config, Stage
from megazero.config.stages import SECTIONS


def test_a_stage_has_the_options_that_the_table_gives_it() -> None:
    values = flatten(Config())
    for key in option_keys():
        section, _, name = key.partition(".")
        stage = {"until_step": 3, section: {name: values[key]}}
        if section not in SECTIONS:
            assert row_of(key).in_stage
        elif row_of(key).in_stage:
            with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
                Stage.model_validate(stage)
        else:
            Stage.model_validate(stage)


def test_every_row_is_of_an_option_and_every_option_has_a_row() -> None:
    rows = {row_of(key) for key in option_keys()}
    assert rows == set(CHANGEABLE)


def test_keys_of_the_command_line() -> None:
    keys = permitted("data, optimizer.betas,batch", option_keys())
    assert keys == ("data", "optimizer.betas", "batch")
    assert is_permitted("data.sources", keys) and is_permitted("batch.global", keys)
    assert not is_permitted("data.tokenizer", keys) and not is_permitted("optimizer.eps", keys)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("model.layers", "MZ-123 --allow-change: model.layers cannot change: the weights have this shape, or were t"),
        ("run.seed", "MZ-123 --allow-change: run.seed cannot change: every random number of the run depends on"),
        ("optimizer.beta", "MZ-104 --allow-change: unknown key 'optimizer.beta'; did you mean optimizer.betas?"),
        ("", "MZ-104 --allow-change: unknown key ''; "),
    ],
)
def test_keys_that_cannot_change(given: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        permitted(given, option_keys())
    assert str(caught.value).startswith(line)
