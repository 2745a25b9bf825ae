"""Garbage is collected at the steps that were chosen for it, and nowhere between them."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from megazero.train import collection
from megazero.train.collection import GarbageCollection
from megazero.train.trainer import Trainer
from tests.tiny_run import TinyData, built


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def begun() -> Iterator[list[str]]:
    """What the collector has done: generation of each collection."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(str(info["generation"]))

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def trained(tiny_data: TinyData, folder: Path, *options: str) -> tuple[list[tuple[int, str]], list[int]]:
    """Train with a cycle left behind in each step; return collections by the steps done, and when the cycles went."""
    seen: list[tuple[int, str]] = []
    freed: list[int] = []
    done = [0]
    trainer, _ = built(tiny_data.load(folder, *options))
    honest = trainer.train_step

    def train_step(step: int) -> None:
        honest(step)
        weakref.finalize(Cycle(), lambda: freed.append(done[0])).atexit = False
        [[] for _ in range(20_000)]  # more than enough for the collector to begin by itself
        done[0] = step + 1

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append((done[0], str(info["generation"])))

    trainer.train_step = train_step  # type: ignore[method-assign]
    frozen = gc.get_freeze_count()
    gc.callbacks.append(note)
    try:
        trainer.run()
    finally:
        gc.callbacks.remove(note)
        trainer.close()
    assert gc.isenabled() and gc.get_freeze_count() <= frozen
    return seen, freed


def test_a_run_collects_where_it_rests_and_frees_cycles_there(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth step, where it saves (3, 6), and behind the last one (9); once before the first."""
    monkeypatch.setattr(collection, "EVERY", 4)
    options = ("run.steps=9", "checkpoint.every=3", "data.valid=null", "observe.every=2")
    seen, freed = trained(tiny_data, tmp_path / "run", *options)
    assert sorted({step for step, generation in seen if generation == "2"}) == [0, 3, 4, 6, 8, 9]
    assert all(step in (0, 9) or generation == "2" for step, generation in seen), "none began by itself"
    assert [step for step in freed if step < 9] == [3, 3, 3, 4, 6, 6, 8, 8] and len(freed) == 9


def test_the_collector_is_as_it_was_afterwards(begun: list[str]) -> None:
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            with pytest.raises(RuntimeError), GarbageCollection() as garbage:
                assert not gc.isenabled() and gc.get_freeze_count() > 0
                begun.clear()
                garbage.after(1, rests=False)
                assert begun == []
                garbage.after(collection.EVERY, rests=False)
                garbage.after(1, rests=True)
                assert begun == ["2", "2"]
                raise RuntimeError
            assert gc.isenabled() == was_on
        finally:
            gc.enable()


def test_a_step_leaves_no_cycle_that_holds_a_tensor(tiny_data: TinyData, tmp_path: Path) -> None:
    """Or a device's memory would fill up between collections."""
    trainer, _ = built(tiny_data.load(tmp_path / "run", "run.steps=4", "data.valid=null", "memory.recompute=full"))
    honest, left = Trainer.train_step, []

    def train_step(step: int) -> None:
        honest(trainer, step)
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            left.append([type(x).__name__ for x in gc.garbage if type(x).__name__ in ("Tensor", "Parameter")])
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    trainer.train_step = train_step  # type: ignore[method-assign]
    trainer.run()
    trainer.close()
    assert left[1:] == [[]] * 3
