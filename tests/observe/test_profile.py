"""A profile records the steps it was asked for, and is nothing when off."""

import json
import logging
import os

import pytest
import torch

from megazero.observe.profile import Profile, _library_lines_in_log


def train(profile: Profile, steps: range) -> None:
    matrix = torch.ones(16, 16)
    for step in steps:
        with profile.step(step):
            matrix @ matrix


def names(path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


def test_records_the_chosen_steps(tmp_path):
    with Profile(3, 2, tmp_path) as profile:
        train(profile, range(1, 8))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "profile_step_00000003.json",
        "profile_step_00000003.txt",
    ]
    found = names(tmp_path / "profile_step_00000003.json")
    assert sorted({name for name in found if name.startswith("step ")}) == ["step 3", "step 4"]
    assert found.count("aten::mm") == 2
    table = (tmp_path / "profile_step_00000003.txt").read_text()
    assert "steps 3 to 4" in table
    assert "aten::mm" in table


def test_off_is_nothing(tmp_path):
    with Profile(0, 0, tmp_path) as profile:
        train(profile, range(4))
    assert list(tmp_path.iterdir()) == []


def test_run_that_ends_early_or_breaks_keeps_what_it_recorded(tmp_path):
    with pytest.raises(ZeroDivisionError), Profile(2, 9, tmp_path) as profile:
        train(profile, range(1, 3))
        with profile.step(3):
            1 / 0  # noqa: B018
    assert "step 3" in names(tmp_path / "profile_step_00000002.json")


def test_vanished_folder_costs_the_files_only(tmp_path, capsys):
    with Profile(1, 1, tmp_path / "gone" / "profile") as profile:
        train(profile, range(1, 3))
    assert "training goes on" in capsys.readouterr().err


def test_what_the_recorder_says_goes_into_the_log(tmp_path, capfd, caplog):
    with caplog.at_level(logging.INFO, "megazero"), Profile(1, 1, tmp_path) as profile:
        train(profile, range(1, 3))
        os.write(2, b"of ours\n")
    assert capfd.readouterr().err == "of ours\n"
    assert all(record.message.startswith("profiler: ") for record in caplog.records)


def test_what_others_say_meanwhile_stays_on_standard_error(tmp_path, capfd, caplog):
    with caplog.at_level(logging.INFO, "megazero"), _library_lines_in_log():
        os.write(2, b"USDT:2026-01-31 17:31:45 1:1 Some.cpp:52] profiler_start\nanother library\n")
    assert capfd.readouterr().err == "another library\n"
    assert [record.message[-14:] for record in caplog.records] == ["profiler_start"]
