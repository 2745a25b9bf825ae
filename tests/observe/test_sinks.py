"""A broken sink costs its rows and one line, never the run or the other sinks."""

import sys

import pytest

from megazero.base.errors import LINE_LIMIT
from megazero.observe.jsonl import JsonlSink, read_rows
from megazero.observe.sinks import Sink, Sinks, warn


class Broken(Sink):
    def __init__(self):
        self.calls = 0

    def row(self, row):
        self.calls += 1
        raise RuntimeError("no space\nleft")

    def close(self):
        raise RuntimeError("cannot close")


class Kept(Sink):
    def __init__(self):
        self.rows = []
        self.closed = 0

    def start(self):
        self.rows.clear()

    def row(self, row):
        self.rows.append(row)

    def close(self):
        self.closed += 1


def test_others_go_on_and_each_broken_sink_warns_once(capsys):
    broken, kept, other = Broken(), Kept(), Broken()
    sinks = Sinks([broken, kept, other])
    sinks.start()
    for step in range(5):
        sinks.row({"step": step})
    sinks.close()
    sinks.close()
    assert [row["step"] for row in kept.rows] == [0, 1, 2, 3, 4]
    assert kept.closed == 1
    assert broken.calls == other.calls == 5  # tried again each time: a disk may have been emptied
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 2
    assert all("RuntimeError: no space left; training goes on" in line for line in err.splitlines())


def test_vanished_folder(tmp_path, capsys):
    kept = Kept()
    sinks = Sinks([JsonlSink(tmp_path / "gone" / "metrics.jsonl"), kept])
    sinks.row({"step": 1})
    (tmp_path / "gone").mkdir()
    sinks.row({"step": 2})
    assert len(kept.rows) == 2
    assert read_rows(tmp_path / "gone" / "metrics.jsonl") == [{"step": 2}]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_interrupts_are_not_swallowed():
    class Interrupted(Kept):
        def row(self, row):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sinks([Interrupted()]).row({})


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_warning_without_a_stderr(stderr, monkeypatch, tmp_path):
    if stderr == "closed":
        stderr = open(tmp_path / "stderr", "w")  # noqa: SIM115
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    warn("nobody hears this")


def test_warning_is_one_short_line(capsys):
    warn("long\n" * 500)
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) == LINE_LIMIT
