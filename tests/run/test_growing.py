"""A source that grows while a run trains: its shards are fixed for each stage, on every grid, after every restart."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megazero.__main__ import main
from megazero.base.errors import UserError
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.config.stages import Course
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.loader import BatchLoader
from megazero.observe.jsonl import read_rows
from megazero.run import parts, shards
from megazero.run.data import open_data
from megazero.run.session import launch
from megazero.run.shards import Lists, read_lists, to_json
from megazero.tools.certify.tolerances import LOSS_FP32, difference
from tests.tiny_run import TinyData, command, repeating

STEPS, SHARDS = 8, 9
LINE = (f"run.steps={STEPS}", "checkpoint.every=1", "data.valid=0.1", "model.dropout=0.1")
NAMES = {0: ["part-0", "part-1"], 3: ["part-2", "part-3", "part-4"], 6: ["part-5"]}  # by the steps done before


def publish(tiny_data: TinyData, folder: Path, number: int) -> None:
    """Write one of the parts of the tiny data set as a shard."""
    whole = IndexedDataset(tiny_data.train)
    with IndexedDatasetWriter(folder / f"part-{number}", whole.dtype) as writer:
        for document in range(number, whole.num_documents, SHARDS):
            writer.append(whole.read(*whole.document_offsets[document : document + 2].tolist()))
            writer.end_document()


def fixed(course: Course, first: int, path: Path, saved: tuple[int, Lists] | None = None) -> Lists:
    """Fix and write the lists of the part with so many steps before it; return those that it reads."""
    manifest = None if saved is None else SimpleNamespace(step=saved[0], shards=to_json(saved[1]))
    part = next(part for part in course.parts if part.first == first)
    lists = shards.fix_lists(course, part, path, manifest)  # pyright: ignore[reportArgumentType]
    shards.write_lists(path, lists)
    return shards.until(lists, part.first)


def named(lists: Lists) -> dict[str, list[tuple[int, list[str]]]]:
    return {
        name: [(added.first, [shard.name for shard in added.shards]) for added in each] for name, each in lists.items()
    }


def options(folder: Path, *, other: Path) -> tuple[str, ...]:
    sources = [{"path": str(folder), "name": "web", "grows": True, "weight": 3}, {"path": str(other), "name": "old"}]
    stages = [{"until_step": 3}, {"until_step": 6, "data": {"sources": sources[:1]}}]
    return (*LINE, "data.train=null", f"data.sources={json.dumps(sources)}", f"stages={json.dumps(stages)}")


@pytest.fixture(scope="module")
def grown(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    """A run in whose second and third stage there are more shards, and half-written ones; its options."""
    folder, run = tmp_path_factory.mktemp("web"), tmp_path_factory.mktemp("grown") / "run"
    for number in (0, 1):
        publish(tiny_data, folder, number)
    line = options(folder, other=tiny_data.train)
    fix = parts.fix_lists

    def writing(course, part, path, manifest):
        """Others have written while the stage before was trained."""
        if part.first:
            for name in NAMES[part.first]:
                publish(tiny_data, folder, int(name[-1]))
            (folder / "part-8.bin").write_bytes(b"half")
        return fix(course, part, path, manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "fix_lists", writing)
        assert launch(tiny_data.load(run, *line), "small", 1) == 0
    for number in (6, 7):  # behind the end of the run
        publish(tiny_data, folder, number)
    return run, line


def test_lists_are_in_the_folder_and_in_every_manifest(grown) -> None:
    run, _ = grown
    assert named(read_lists(run / "shards.json")) == {"web": list(NAMES.items())}
    whole, store = json.loads((run / "shards.json").read_text())["web"], Store(run / "checkpoints")
    for step in store.steps():
        known = [added for added in whole if added["first"] < step]
        assert read_manifest(store.path(step)).shards == {"web": known}, step


def seen(tiny_data: TinyData, run: Path, line: tuple[str, ...], ranks: int, micro: int) -> dict[int, list]:
    """Of each sample the (source, document, offset) of every token that a grid reads, with the lists of its part."""
    course, lists, found = Course(tiny_data.load(run, *line)), read_lists(run / "shards.json"), dict[int, list]()
    for part in course.parts:
        now = {name: [added for added in each if added.first <= part.first] for name, each in lists.items()}
        data = open_data(part.config, course, now)
        for rank in range(ranks):
            begins = {"begins": (part.first, part.samples), "ends": part.end, "others": data.others}
            loader = BatchLoader(
                data.mixture, global_batch=4, micro_batch=micro, data_rank=rank, num_data=ranks, **begins
            )
            for step in range(part.first, part.end):
                for batch in loader.step(step):
                    ids = batch.sample_ids_B.numpy()
                    for b, (id_, source, window) in enumerate(
                        zip(ids.tolist(), *data.mixture.locate(ids), strict=True)
                    ):
                        chosen = data.mixture.sources[source].windows
                        text = [chosen.stream.locate(position) for position in range(32 * window, 32 * window + 32)]
                        offsets = [chosen.stream.dataset.document_offsets[d] + o for d, o in text]
                        tokens = [int(chosen.stream.dataset.read(at, at + 1)[0]) for at in offsets]
                        assert batch.tokens_SB[:, b].tolist() == tokens
                        found[id_] = [(source, *each) for each in text]
            loader.close()
    return found


def test_three_grids_read_the_same_and_no_text_twice(tiny_data: TinyData, grown, capsys) -> None:
    run, line = grown
    first = seen(tiny_data, run, line, 1, 4)
    assert seen(tiny_data, run, line, 2, 2) == first == seen(tiny_data, run, line, 4, 1)
    assert sorted(first) == list(range(4 * STEPS))
    web = [place for sample in first.values() for place in sample if place[0] == 0]
    assert len(set(web)) == len(web) > 16 * 32, "each window once, also where the source has grown"
    late = {document for sample in range(24, 32) for source, document, _ in first[sample] if source == 0}
    counts = np.cumsum([shard.documents for a in read_lists(run / "shards.json")["web"] for shard in a.shards])
    assert max(late) >= counts[1], "new shards are read"
    for step in range(1, STEPS + 1):
        capsys.readouterr()
        assert main(["data", "--run", str(run), "--step", str(step), "--json"]) == 0
        told: dict[int, list] = {}
        for piece in json.loads(capsys.readouterr().out):
            names = [name for each in NAMES.values() for name in each]
            before = 0 if piece["shard"] is None else int(np.append(0, counts)[names.index(piece["shard"])])
            source = 0 if piece["source"] == "web" else 1
            assert (piece["shard"] is None) == (source == 1)
            offsets = range(piece["offset"], piece["offset"] + piece["tokens"])
            told.setdefault(piece["sample"], []).extend((source, before + piece["document"], o) for o in offsets)
        assert told == {sample: first[sample] for sample in range(4 * step - 4, 4 * step)}


def test_when_a_document_of_a_shard_was_seen(grown, capsys) -> None:
    run, _ = grown
    assert main(["data", "--run", str(run), "--step", "7", "--json"]) == 0
    piece = next(each for each in json.loads(capsys.readouterr().out) if each["source"] == "web")
    line = ["data", "--run", str(run), "--document", str(piece["document"]), "--source", "web"]
    assert main([*line, "--shard", piece["shard"], "--json"]) == 0
    del piece["text"]
    assert {"step": 7} | piece in json.loads(capsys.readouterr().out)
    for more, message in (([], "--shard is missing"), (["--shard", "no"], "no such shard")):
        assert main([*line, *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("step", [3, 7, *(pytest.param(step, marks=pytest.mark.full) for step in (0, 2, 4, 6))])
def test_a_restart_reads_the_same_lists(tiny_data: TinyData, grown, tmp_path: Path, step: int) -> None:
    """At a boundary and between, though the folder has more by now; also without the run's own file."""
    run, line = grown
    again = Path(shutil.copytree(run, tmp_path / "run"))
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    if step == 7:
        (again / "shards.json").unlink()
    assert launch(tiny_data.load(again, *line, "checkpoint.resume=auto"), "small", 1) == 0
    rows = [[repeating(row) for row in read_rows(folder / "metrics.jsonl")] for folder in (run, again)]
    assert rows[0] == rows[1] and len(rows[0]) == STEPS
    assert read_lists(again / "shards.json") == read_lists(run / "shards.json")


def test_another_grid_reads_the_same(tiny_data: TinyData, grown, tmp_path: Path) -> None:
    run, line = grown
    again = Path(shutil.copytree(run, tmp_path / "run"))
    for later in range(3, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    grid = (f"run.dir={again}", "checkpoint.resume=auto", "--nproc", "2", "zero.stage=2")
    done = command("train.py", "--config", tiny_data.config, *line, *grid)
    assert (done.returncode, done.stderr) == (0, "")
    rows, expected = (read_rows(folder / "metrics.jsonl") for folder in (again, run))
    assert [row["samples"] for row in rows] == [row["samples"] for row in expected]
    assert difference([row["loss"] for row in rows], [row["loss"] for row in expected]) <= LOSS_FP32
    assert read_lists(again / "shards.json") == read_lists(run / "shards.json")


def test_another_run_that_begins_there_reads_the_same(tiny_data: TinyData, grown, tmp_path: Path) -> None:
    """It has no lists of its own: the manifest has them."""
    run, line = grown
    begin = f"checkpoint.resume={run / 'checkpoints/step_00000004'}"
    assert launch(tiny_data.load(tmp_path / "run", *line, begin), "small", 1) == 0
    rows, expected = ([repeating(row) for row in read_rows(each / "metrics.jsonl")] for each in (tmp_path / "run", run))
    assert [row["loss"] for row in rows[:2]] == [row["loss"] for row in expected[4:6]]
    lists, theirs = (read_lists(each / "shards.json")["web"] for each in (tmp_path / "run", run))
    assert lists[:2] == theirs[:2] and [shard.name for shard in lists[2].shards] == ["part-5", "part-6", "part-7"]


def test_a_shard_that_is_not_whole_is_left_for_the_next_stage(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    for number in (0, 1):
        publish(tiny_data, tmp_path, number)
    whole = (tmp_path / "part-1.bin").read_bytes()
    (tmp_path / "part-1.bin").write_bytes(whole[:100])
    course, path = Course(tiny_data.load(tmp_path, *options(tmp_path, other=tiny_data.train))), tmp_path / "shards.json"

    def names(part: int) -> list[tuple[int, list[str]]]:
        return named(fixed(course, part, path))["web"]

    assert names(0) == [(0, ["part-0"])]
    err = capsys.readouterr().err
    told = f"1 shards are not whole, and left for the next stage: {tmp_path / 'part-1.bin'}: expected"
    assert told in err and err.count("\n") == 1
    (tmp_path / "part-1.bin").write_bytes(whole)
    assert names(0) == [(0, ["part-0"])], "the list of a part holds"
    assert names(3) == [(0, ["part-0"]), (3, ["part-1"])]
    assert names(0) == [(0, ["part-0"])] and names(6) == [(0, ["part-0"]), (3, ["part-1"]), (6, [])]
    (tmp_path / "shards.json").write_text("{")
    with pytest.raises(UserError, match=r"MZ-406 .*shards\.json: is damaged"):
        names(3)


@pytest.mark.parametrize("fault", ["gone", "another"])
def test_a_shard_that_is_not_what_it_was_is_one_line(tiny_data: TinyData, grown, tmp_path: Path, fault, capsys) -> None:
    run, line = grown
    again, web = Path(shutil.copytree(run, tmp_path / "run")), tmp_path / "web"
    sources = json.loads(next(each for each in line if each.startswith("data.sources=")).partition("=")[2])
    shutil.copytree(sources[0]["path"], web)
    moved = [each.replace(sources[0]["path"], str(web)) for each in line]
    for later in range(5, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    if fault == "gone":
        (web / "part-3.idx").unlink()
    else:
        (web / "part-3.bin").write_bytes(bytes((web / "part-3.bin").stat().st_size))
    run_line = [f"run.dir={again}", "checkpoint.resume=auto", "--allow-change", "data.sources,stages"]
    assert main(["train", "--config", str(tiny_data.config), *moved, *run_line]) == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("MZ-228 ") and "part-3" in err and ("is gone" if fault == "gone" else "has changed") in err


def test_a_folder_without_shards_is_refused_at_once(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    (tmp_path / "web").mkdir()
    line = options(tmp_path / "web", other=tiny_data.train)
    assert main(["train", "--config", str(tiny_data.config), *line, f"run.dir={tmp_path / 'run'}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("MZ-228 ") and err.count("\n") == 1 and not (tmp_path / "run").exists()
    assert main(["train", "--config", str(tiny_data.config), *line, "data.pack=true", "data.mask_eod=true"]) == 2
    assert "data.pack == false with a source that grows" in capsys.readouterr().err


def test_a_source_that_is_named_no_more_keeps_its_lists(tiny_data: TinyData, grown, tmp_path: Path, capsys) -> None:
    run, line = grown
    again = Path(shutil.copytree(run, tmp_path / "run"))
    for later in range(5, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    fresh = tmp_path / "fresh"
    publish(tiny_data, fresh, 8)
    sources = [{"path": str(fresh), "name": "fresh", "grows": True}]
    other = [each for each in line if not each.startswith(("data.sources", "stages"))]
    other += [f"data.sources={json.dumps(sources)}", "stages=null", "checkpoint.resume=auto"]
    arguments = ["train", "--config", str(tiny_data.config), *other, f"run.dir={again}"]
    assert main([*arguments, "--allow-change", "data.sources,stages"]) == 0
    lists = read_lists(again / "shards.json")
    assert [added.first for added in lists["web"]][:2] == [0, 3] and [added.first for added in lists["fresh"]] == [4]
    told = []
    for folder in (run, again):
        capsys.readouterr()
        assert main(["data", "--run", str(folder), "--step", "4", "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert main(["data", "--run", str(again), "--step", "6", "--json"]) == 0
    assert {piece["shard"] for piece in json.loads(capsys.readouterr().out)} == {"part-8"}


def test_a_growing_source_that_is_no_folder(tiny_data: TinyData, tmp_path: Path, capsys) -> None:
    line = options(tiny_data.train, other=tiny_data.train)
    assert main(["train", "--config", str(tiny_data.config), *line, f"run.dir={tmp_path / 'run'}"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("MZ-201 ") and "give a folder of token files" in err and not (tmp_path / "run").exists()


CHANGE = {"key": "data.max_epochs", "from": None, "to": None}  # any change of options is a boundary


def test_lists_of_a_course_that_was_left_do_not_hold(tiny_data: TinyData, tmp_path: Path) -> None:
    """Options were changed at step 4, where no step was saved; then the run goes on there without that."""
    publish(tiny_data, tmp_path, 0)
    config, path = tiny_data.load(tmp_path, *options(tmp_path, other=tiny_data.train)), tmp_path / "shards.json"
    course = Course(config)
    saved = 4, fixed(course, 3, path)
    publish(tiny_data, tmp_path, 1)
    changed = Course(config, [{"step": 4} | CHANGE])
    assert named(fixed(changed, 4, path, saved)) == {"web": [(3, ["part-0"]), (4, ["part-1"])]}
    assert named(fixed(changed, 4, path, saved)) == {"web": [(3, ["part-0"]), (4, ["part-1"])]}, "it is as it was"
    assert named(fixed(course, 3, path, saved)) == {"web": [(3, ["part-0"])]}
    assert named(fixed(course, 6, path, (6, saved[1]))) == {"web": [(3, ["part-0"]), (6, ["part-1"])]}, "read from 7 on"


def test_a_run_that_goes_back_behind_its_first_list(tiny_data: TinyData, tmp_path: Path) -> None:
    """The source was added at step 3; the run goes back to step 2, and has it from there on."""
    publish(tiny_data, tmp_path, 0)
    config, path = tiny_data.load(tmp_path, *options(tmp_path, other=tiny_data.train)), tmp_path / "shards.json"
    assert named(fixed(Course(config), 3, path, (3, {}))) == {"web": [(3, ["part-0"])]}
    lists = fixed(Course(config, [{"step": 2} | CHANGE]), 2, path, (2, {}))
    assert named(lists) == {"web": [(2, ["part-0"])]}
    assert shards.until(lists, 1) == {}, "a manifest has no lists without shards"


def test_lists_that_no_manifest_holds_are_refused(tiny_data: TinyData, tmp_path: Path, monkeypatch) -> None:
    publish(tiny_data, tmp_path, 0)
    course = Course(tiny_data.load(tmp_path, *options(tmp_path, other=tiny_data.train)))
    monkeypatch.setattr(shards, "_MOST", 50)
    with pytest.raises(UserError, match=r"MZ-228 .*shards\.json: .* have \d+ bytes, at most 50 go into the manifest"):
        fixed(course, 0, tmp_path / "shards.json")


def test_a_shard_that_is_refused_is_in_no_list(tiny_data: TinyData, grown, tmp_path: Path, capsys) -> None:
    """Taken away, it does not keep the run from going on."""
    run, line = grown
    again, web = Path(shutil.copytree(run, tmp_path / "run")), tmp_path / "web"
    sources = json.loads(next(each for each in line if each.startswith("data.sources=")).partition("=")[2])
    shutil.copytree(sources[0]["path"], web)
    for later in range(4, STEPS + 1):
        shutil.rmtree(again / f"checkpoints/step_{later:08d}")
    (again / "shards.json").unlink()
    with IndexedDatasetWriter(web / "other", np.int64) as writer:
        writer.append(np.arange(100))
        writer.end_document()
    moved = [each.replace(sources[0]["path"], str(web)) for each in line]
    run_line = [f"run.dir={again}", "checkpoint.resume=auto", "--allow-change", "data.sources,stages"]
    assert main(["train", "--config", str(tiny_data.config), *moved, *run_line]) == 1
    assert "MZ-228" in (err := capsys.readouterr().err) and "other.bin: stores int64" in err
    (web / "other.idx").unlink()
    assert main(["train", "--config", str(tiny_data.config), *moved, *run_line]) == 0
    assert named(read_lists(again / "shards.json"))["web"][0] == (0, NAMES[0])


def test_another_share_of_documents_is_other_data(tiny_data: TinyData, grown) -> None:
    """Also where its first shards have as many windows: of later ones, others would be held out."""
    run, line = grown
    lists = read_lists(run / "shards.json")
    told = []
    for share in (0.1, 0.1000001):
        config = tiny_data.load(run, *line, f"data.valid={share}")
        told.append(open_data(config, Course(config), lists).digest())
    assert told[0] != told[1]
