"""scripts/bench/quickstart.py trains each setting on the same text for the seconds that it is given."""

import argparse
from pathlib import Path

import pytest

from scripts import quickstart_data
from scripts.bench import quickstart

TEXTS = [f"def function_{n}(value):\n    return value + {n}\n" * 40 for n in range(120)]


def test_settings_name_options_and_are_twenty_at_least():
    assert len(quickstart.SETTINGS) >= 20
    words = quickstart.words_of({**quickstart.BASE, **quickstart.SETTINGS["beta2 0.98"]}, Path("data"), Path("run"), 1)
    assert {"optimizer.betas=[0.9, 0.98]", "model.vocab=4096", "batch.micro=4", "data.train=data/train"} <= set(words)
    wholes = [str({**quickstart.BASE, **setting}) for setting in quickstart.SETTINGS.values()]
    assert len(set(wholes)) == len(wholes), "no setting is there twice"


@pytest.mark.full
def test_a_setting_is_trained_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart_data, "documents", lambda: TEXTS)
    tiny = {"model.layers": 1, "model.hidden": 16, "model.heads": 2, "model.vocab": 300, "model.seq_len": 32}
    monkeypatch.setattr(quickstart, "BASE", {**quickstart.BASE, **tiny})
    monkeypatch.setattr(quickstart, "SETTINGS", {"a": {}, "b": {"optimizer.lr": 1e-6}})
    options = argparse.Namespace(seconds=1.0, only=["*"], launches=1)
    (report,) = quickstart.reports(options, tmp_path)
    best, worst = report["rows"]
    assert (best["system"], worst["system"]) == ("a", "b")
    columns = best["columns"]
    assert columns["bits/byte"] < worst["columns"]["bits/byte"]
    assert columns["tokens/step"] == 8 * 32 and columns["steps"] >= quickstart.TRIED
    assert columns["parameters, M"] == pytest.approx(1e-6 * counted(300, 16, 256))


def counted(vocab: int, hidden: int, ffn: int) -> int:
    """Return the parameters of one Llama block, a last norm and a tied embedding."""
    return vocab * hidden + 4 * hidden**2 + 3 * hidden * ffn + 3 * hidden
