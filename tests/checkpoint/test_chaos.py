"""SIGKILLs at random moments of saving. `python scripts/chaos.py` has more of them; `make test-all` a thousand."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.chaos import Chance, Tally, storm

pytestmark = pytest.mark.full


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder on a disk: a save is to take its time, so that kills come in the middle of it."""
    with tempfile.TemporaryDirectory(prefix="mz-") as folder:
        yield Path(folder)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kills", "ranks", "seed"), [(12, 2, 1), (740, 2, 2), (150, 1, 3), (50, 4, 4)])
def test_no_kill_ever_costs_more_than_an_interval(tmp_path: Path, kills: int, ranks: int, seed: int) -> None:
    tally = storm(tmp_path, kills, ranks, Chance(seed))
    assert tally.faults == []
    assert tally.kills == kills and tally.partial > 0, "steps were being written when the kills came"
    assert tally.steps > 0


def test_what_is_lost_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that say they are whole before they are, and with steps that go, the storm finds faults."""
    from megazero.checkpoint import store

    commit = store.Store.commit

    def careless(self: store.Store, step: int, manifest: bytes) -> Path:
        path = commit(self, step, manifest)
        with next(path.glob("shard_*")).open("r+b") as file:
            file.write(b"\0" * 16)
        return path

    monkeypatch.setattr(store.Store, "commit", careless)
    tally: Tally = storm(tmp_path, 3, 1, Chance(0))
    assert any("MZ-410" in fault for fault in tally.faults)
