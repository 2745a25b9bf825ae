"""scripts/bench/data.py: every system does its task, and one that makes other tokens is refused."""

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from megazero.data.indexed_dataset import IndexedDataset
from scripts.bench import data
from scripts.bench.data import ACTS, EXPECTED, OURS, PEER, PLAIN, group_of, make_data, rated
from scripts.bench.harness import Measured, measure
from scripts.bench.processes import Memory

VOCAB = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench-data")
    make_data(path, 0.05, VOCAB)
    return path


def test_the_text_is_as_large_as_asked_for(folder: Path):
    size = sum(len(text.encode()) for text in data.texts_of(folder))
    assert 30_000 < size <= 50_000 and IndexedDataset(folder / EXPECTED).num_documents > 3


@pytest.mark.parametrize(("task", "who"), [(task, who) for task in ACTS for who in ACTS[task]])
def test_every_system_does_its_task(task: str, who: str, folder: Path):
    if who == PEER and not importlib.util.find_spec("tokenizers"):
        pytest.skip("tokenizers is not installed")
    act, check = ACTS[task][who](folder, VOCAB, 1)
    act()
    check()


def test_other_tokens_are_refused(folder: Path):
    act, check = ACTS["preprocessing"][PLAIN](folder, VOCAB, 1)
    act()
    ids = np.fromfile(folder / f"{PLAIN}.bin", np.uint16)
    ids[-1] ^= 1
    ids.tofile(folder / f"{PLAIN}.bin")
    with pytest.raises(ValueError, match="sentencepiece made other ids than ours"):
        check()


def test_a_task_is_done_in_a_process_of_its_own(forked: None, folder: Path):
    system, *_ = group_of("preprocessing", folder, VOCAB, 1, ["*"]).systems
    (launch,) = measure([system], launches=1, rounds=1).launches
    assert [seconds > 0 for seconds in launch[PLAIN]] == [True]


def test_a_peer_that_is_not_installed_is_a_row(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    group = group_of("tokenizer training", folder, VOCAB, 2, ["*"])
    assert group.title == "tokenizer training, 2 processes"
    assert [system.name for system in group.systems] == [PLAIN, f"{PLAIN}, again", OURS]
    measured = Measured([{system.name: [0.5, 0.5] for system in group.systems}], [], {}, [])
    measured.memory.update({system.name: Memory(1, 1) for system in group.systems})
    report = rated(group, measured, lambda system: {"MB": 3.0}, resident=False)
    assert [row["system"] for row in report["rows"]][-1] == PEER and report["rows"][-1]["reason"] == "not installed"
    assert report["rows"][0]["columns"] == {"MB/s": 6.0} and report["rows"][0]["peak_mb"] is None


@pytest.mark.full
def test_tables_of_both_tasks(forked: None, folder: Path):
    told = {"vocab": VOCAB, "processes": [1], "only": ["*"], "launches": 1, "pairs": 2}
    found = list(data.reports(folder, argparse.Namespace(**told)))
    assert [report["title"] for report in found] == ["preprocessing, 1 process", "tokenizer training, 1 process"]
    assert all(row["columns"]["tokens/s"] > 0 for row in found[0]["rows"] if row["ratio"] is not None)
