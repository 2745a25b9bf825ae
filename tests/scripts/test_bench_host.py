"""scripts/bench/host.py does what it says, at a tiny size."""

import argparse
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.distributed.optim's own use of torch.jit
    from scripts.bench import host


@pytest.mark.full
def test_each_group_tells_the_microseconds_of_each_part(forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LAYERS", 2)
    monkeypatch.setattr(host, "STEPS", 1)
    only = ["ours-stage[13]", "ddp", "deepspeed-stage9"]
    told = {"groups": ["alone", "unsent", "sent"], "only": only, "launches": 1, "pairs": 2, "before": None}
    reports = list(host.reports(argparse.Namespace(**told)))
    assert [report["title"] for report in reports] == list(host.TITLES.values())
    for report in reports:
        rows = {row["system"]: row["columns"] for row in report["rows"]}
        assert list(rows) == ["plain torch", "ours-stage1", "ours-stage3", "ddp"]
        assert rows["plain torch"]["excess us"] == 0
        assert all(0 < row["forward us"] < row["step us"] * 100 for row in rows.values())


def test_what_is_not_installed_is_an_absent_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    names = [system.name for system in host.systems_of("sent")]
    assert {name for name in names if host.missing(name)} == {f"deepspeed-stage{stage}" for stage in (1, 2, 3)}
    assert not any(name.startswith("deepspeed") for name in (one.name for one in host.systems_of("unsent")))
