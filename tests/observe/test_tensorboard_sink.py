"""Scalars arrive in the event file; an absent package is the user's to install."""

import importlib.util
import math

import pytest

from megazero.base.errors import UserError
from megazero.observe.sinks import Sinks
from megazero.observe.tensorboard_sink import TensorboardSink


def test_absent_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"MZ-161.*pip install tensorboard"):
        TensorboardSink(tmp_path)


def test_folder_that_cannot_be_made_costs_the_rows_only(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    sinks = Sinks([TensorboardSink(tmp_path / "file" / "tensorboard")])
    sinks.row({"step": 1, "loss": 2.5})
    sinks.row({"step": 2, "loss": 2.5})
    sinks.close()
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the package's own imports
def test_scalars_by_key_and_step(tmp_path):
    pytest.importorskip("tensorboard")
    sink = TensorboardSink(tmp_path / "tensorboard")
    sink.start()
    sink.row({"step": 10, "loss": 2.5, "mfu": None, "seconds": {"data": 0.25}})
    sink.row({"step": 20, "loss": math.nan, "valid_loss": 2.25})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "seconds/data", "valid_loss"]
    assert [(event.step, event.value) for event in events.Scalars("valid_loss")] == [(20, 2.25)]
    assert [event.step for event in events.Scalars("loss")] == [10, 20]
