"""scripts/bench/{generate,tools,checkpoint,runs}.py do what they say, at tiny sizes."""

import argparse
import shutil
import sys
from pathlib import Path

import pytest

from megazero.__main__ import _parser
from megazero.config.file import load
from megazero.config.schema import Model
from scripts.bench import checkpoint, generate, operations, runs, tools
from scripts.bench.figures import table
from scripts.bench.harness import Measured, run

TINY = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 64}


@pytest.mark.full
def test_generation_by_all_systems_gives_the_same_tokens(forked: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "SMALL", TINY)
    monkeypatch.setattr(generate, "VOCAB", 64)
    told = {"contexts": [4, 9], "tokens": 3, "threads": [1], "only": ["*"], "launches": 1, "pairs": 2}
    first, second = generate.reports(argparse.Namespace(**told))
    assert (first["title"], second["title"]) == ("3 tokens after 4, 1 thread", "3 tokens after 9, 1 thread")
    names = ["plain torch", "plain torch, again", "plain torch, last logits", "ours"]
    assert [row["system"] for row in first["rows"]] == names
    assert all(row["columns"]["tokens/s"] == pytest.approx(3 / row["seconds"]) for row in second["rows"])


def test_other_tokens_are_refused():
    with pytest.raises(ValueError, match="different tokens"):
        generate.require_same_tokens(Measured([], [{"a": [1.0, 1.0], "b": [1.0, 2.0]}], {}, []))
    assert generate.sum_of([1, 2]) != generate.sum_of([2, 1])


@pytest.mark.full
def test_a_verb_is_measured_as_a_whole_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tools, "COMMANDS", {"others": {"explain": "explain run", "not this": "explain model"}})
    told = {"tables": ["others"], "only": ["expl*"], "launches": 2}
    (report,) = tools.reports(argparse.Namespace(**told), tmp_path)
    (row,) = report["rows"]
    assert list(row["columns"]) == ["s", "least s", "most s", "processor s", "MB"]
    assert 0 < row["columns"]["least s"] <= row["columns"]["s"] <= row["columns"]["most s"]
    assert table(report).startswith("| system | s | least s | most s | processor s | MB |\n| --- |")


@pytest.mark.full
def test_memory_is_that_of_the_command_and_of_what_it_starts():
    inner = "held = b'x' * 60_000_000"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert 60 < tools.used_by([sys.executable, "-c", code]).megabytes < 100
    with pytest.raises(RuntimeError, match="because"):
        tools.used_by([sys.executable, "-c", "raise SystemExit('because')"])


@pytest.mark.full
def test_the_verbs_know_their_options():
    for words in [
        words.format(tokens="tokens").split() for verbs in tools.COMMANDS.values() for words in verbs.values()
    ]:
        options, overrides = _parser().parse_known_args(words)
        assert not any(word.startswith("-") for word in overrides)
        if words[0] != "explain":
            load(options.config, [*options.overrides, *overrides])


@pytest.mark.full
def test_the_fast_verbs_end_well(tmp_path: Path):
    (report,) = tools.reports(argparse.Namespace(tables=["others"], only=["*"], launches=1), tmp_path)
    assert len(report["rows"]) == len(tools.COMMANDS["others"])


@pytest.mark.parametrize("megabytes", [20, 100, 500, 2000])
def test_a_state_is_about_as_large_as_asked_for(megabytes: float, tmp_path: Path):
    group, *_ = checkpoint.groups_of("save", checkpoint.model_of(megabytes), str(tmp_path), ["*"])
    size = float(group.title.split()[2])
    assert size == pytest.approx(megabytes, rel=0.15)


def test_titles_of_large_states_differ_by_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(checkpoint, "TOGETHER", 0)
    groups = list(checkpoint.groups_of("stall", checkpoint.model_of(20), str(tmp_path), ["*"]))
    assert [group.title.partition(" MB ")[2] for group in groups] == ["(1 of 2)", "(2 of 2)"]
    assert [[one.name for one in group.systems] for group in groups] == [
        ["dcp-stall", "dcp-stager-stall"],
        ["dcp-stall", "ours-stall"],
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_saves_and_loads_of_all_systems(forked: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = Model.model_validate(TINY | {"seq_len": 256, "vocab": 8192, "dropout": 0.0})
    told = {"only": ["*"], "launches": 1, "pairs": 2, "json": False, "save": False}
    for kind in checkpoint.KINDS:
        assert run(checkpoint.groups_of(kind, model, str(tmp_path), ["*"]), argparse.Namespace(**told)) == 0
    assert "| dcp-stager-stall | " in capsys.readouterr().out


@pytest.mark.full
def test_memory_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "SMALLER", TINY | {"vocab": runs.VOCAB, "seq_len": 32})
    runs.make_data(tmp_path)
    report = runs.resident(tmp_path, [2], launches=1)
    assert [row["system"] for row in report["rows"]] == ["2 ranks"]
    assert all(megabytes > 20 for megabytes in report["rows"][0]["columns"].values())


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_rows_of_operations_say_whose_a_run_takes():
    names = ["layer_norm", *(beside + "layer_norm" for beside in (operations.LIMIT, operations.TORCH))]
    rows = [pair.row for pair in operations.pairs_of("bf16", names)]
    assert rows == ["layer_norm (auto: ours), of the limit", "layer_norm (auto: ours), of torch's"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_every_operation_is_timed_in_every_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operations, "_keep_freed_memory", lambda: None)
    pairs = 0
    for group in (operations.group_of("bf16", 1), operations.quantised_group("bf16", 1, 2)):
        (system,) = group.systems
        calls = system.build(*system.arguments)
        assert isinstance(calls, dict) and {call() for call in calls.values()} == {0.0}
        pairs += len(operations.pairs_of("bf16", calls))
    assert pairs > 40
