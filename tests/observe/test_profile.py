"""A profile records the steps it was asked for, and is nothing when off."""

import json
from contextlib import closing

import pytest
import torch

from megazero.observe.profile import Profile


def train(profile: Profile, steps: range) -> None:
    matrix = torch.ones(16, 16)
    for step in steps:
        with profile.step(step):
            matrix @ matrix


def names(path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


def test_records_the_chosen_steps(tmp_path):
    with closing(Profile(3, 2, tmp_path)) as profile:
        train(profile, range(1, 8))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "profile_step_00000003.json",
        "profile_step_00000003.txt",
    ]
    found = names(tmp_path / "profile_step_00000003.json")
    assert sorted({name for name in found if name.startswith("step ")}) == ["step 3", "step 4"]
    assert found.count("aten::mm") == 2
    table = (tmp_path / "profile_step_00000003.txt").read_text()
    assert "aten::mm" in table


def test_off_is_nothing(tmp_path):
    with closing(Profile(0, 0, tmp_path)) as profile:
        train(profile, range(4))
    assert list(tmp_path.iterdir()) == []


def test_run_that_ends_early_or_breaks_keeps_what_it_recorded(tmp_path):
    with pytest.raises(ZeroDivisionError), closing(Profile(2, 9, tmp_path)) as profile:
        train(profile, range(1, 3))
        with profile.step(3):
            1 / 0  # noqa: B018
    assert "step 3" in names(tmp_path / "profile_step_00000002.json")


def test_vanished_folder_costs_the_files_only(tmp_path, capsys):
    with closing(Profile(1, 1, tmp_path / "gone" / "profile")) as profile:
        train(profile, range(1, 3))
    assert "training goes on" in capsys.readouterr().err
