"""Keep what a command has done where another one, of the same words, finds it: PREFIX.unfinished/.

    tokens.bin     ids of the documents that are done, and perhaps of one that is not
    lengths.bin    tokens of each document, int64
    hashes.bin     where duplicates are looked for, 16 bytes of each document that was kept
    mask.bin       where the tokens of answers alone are trained on, a byte for each token: 1, or 0
    state.json     which command line it is, how far it has come in the corpus, the counts up to there; replaced whole

The state is written every few seconds, after the tokens of its documents are on the disk; what lies behind them in the
files is cut off by the next command. A place is that of a document's end, so a document that is as large as the rest of
the corpus is begun anew.
"""

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data_tools.places import Mark
from data_tools.skipped import Skipped
from megazero.base.atomic import write_error
from megazero.base.errors import UserError
from megazero.base.files import flush, replace_file
from megazero.base.reading import parse_object, read_file
from megazero.data.loss_mask import LossMaskWriter

SECONDS = 5.0  # between two states
_HASH, _STATE_BYTES, _BLOCK = 16, 64 << 20, 1 << 22


@dataclass(frozen=True)
class State:
    """How far a command has come.

    Attributes:
        mark: the place in the corpus.
        documents, tokens: that are done; tokens with those that end documents.
        empty: documents without a token, which are left out.
        bytes, id_bytes: of the text, and those that its ids stand for.
        longest: tokens of the longest document.
        scored: tokens that are trained on.
        cut: documents that were so long that they were cut where that may change ids.
        rejected: the reasons of what was skipped.
    """

    mark: Mark = field(default_factory=Mark)
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bytes: int = 0
    id_bytes: int = 0
    longest: int = 0
    scored: int = 0
    cut: int = 0
    rejected: list[str] = field(default_factory=list)


class Unfinished:
    """The folder of a command that is under way, which goes on where one of the same words has ended.

    Args:
        output: prefix of the token files.
        job: all that the result depends on, in words.
        itemsize: bytes of an id.
        masked: tokens have a mask.

    Attributes:
        state: how far it has come; whoever works gives another one at the end of each document, whole, because an
            interrupt may come at any time.
        goes_on: something was found to go on from.
        tokens, mask: the files that become those of the data set; mask None: it has none.

    Raises:
        UserError: 208, it cannot be written, or another command is at work there.
    """

    def __init__(self, output: Path, job: str, itemsize: int, *, masked: bool = False):
        self.folder, self._job, self._output = Path(f"{output}.unfinished"), job, output
        self.tokens, self._scored = self.folder / "tokens.bin", self.folder / "mask.bin"
        self.mask = self.folder / "mask" if masked else None
        self._files: dict[str, BinaryIO] = {}
        self.state, self.goes_on, self._itemsize = State(), False, itemsize
        self._saved = time.monotonic()

    def __enter__(self) -> "Unfinished":
        with self._write_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files["lock"] = (self.folder / "lock").open("ab")
            try:
                fcntl.flock(self._files["lock"], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._files.pop("lock").close()
                what = "is being written by another command"
                raise UserError(208, what, "wait for it, or give another --output", where=self._output) from None
            found = self._read()
            self.goes_on, self.state = found is not None, found or State()
            sizes = {"lengths": 8 * self.state.documents, "hashes": _HASH * self._hashes()}
            for name, size in (sizes | ({"mask": self.state.tokens} if self.mask else {})).items():
                file = (self.folder / f"{name}.bin").open("ab")
                file.truncate(size)
                self._files[name] = file
        return self

    def lengths(self) -> Iterator[int]:
        """Yield the tokens of each document that is done."""
        yield from np.fromfile(self.folder / "lengths.bin", "<i8").tolist()

    def digests(self) -> list[bytes]:
        """Return the hashes of the documents that were kept."""
        data = (self.folder / "hashes.bin").read_bytes()
        return [data[at : at + _HASH] for at in range(0, len(data), _HASH)]

    def score(self, count: int, scored: bool) -> None:
        """Note of so many more tokens whether they are trained on; where tokens have no mask, nothing."""
        if self.mask is not None:
            with self._write_errors():
                self._files["mask"].write(bytes([scored]) * count)

    def write_mask(self) -> str | None:
        """Write the mask of all tokens, and return its digest; None: they have none. Raises UserError 208."""
        if self.mask is None:
            return None
        with self._write_errors():
            self._files["mask"].flush()
            with LossMaskWriter(self.mask) as writer, self._scored.open("rb") as file:
                while block := file.read(_BLOCK):
                    writer.append(np.frombuffer(block, np.uint8).astype(bool))
        return writer.digest

    def add(self, length: int, digest: bytes | None) -> None:
        """Note the end of a document that is kept."""
        with self._write_errors():
            self._files["lengths"].write(length.to_bytes(8, "little"))
            if digest is not None:
                self._files["hashes"].write(digest)

    def is_due(self) -> bool:
        """Return whether the state is old."""
        return time.monotonic() - self._saved >= SECONDS

    def save(self, skipped: Skipped | None) -> None:
        """Write the state, of which the tokens are on the disk. Raises UserError 208."""
        state = replace(self.state, rejected=[] if skipped is None else skipped.lines[: self.state.mark.rejected])
        with self._write_errors():
            for name in ("lengths", "hashes"):
                self._files[name].flush()
            if self.mask is not None:
                flush(self._files["mask"])
            replace_file(self.folder / "state.json", json.dumps({"job": self._job, **asdict(state)}).encode())
        self._saved = time.monotonic()

    def leave(self, skipped: Skipped | None) -> None:
        """Save what can be saved of a command that does not come to its end; nothing stays where nothing was done."""
        with suppress(UserError, OSError):
            if self.state.documents:
                self.save(skipped)
            else:
                shutil.rmtree(self.folder)

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def remove(self) -> None:
        """Remove the folder, of token files that are finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hashes(self) -> int:
        """Return how many hashes are there, of which each document that is done has one, or none has."""
        path = self.folder / "hashes.bin"
        return self.state.documents if path.exists() and path.stat().st_size else 0

    def _read(self) -> State | None:
        """Return the state of the same command line, if its files hold what it says."""
        try:
            found: dict[str, Any] = parse_object(read_file(self.folder / "state.json", _STATE_BYTES))
            if found.pop("job") != self._job:
                return None
            state = State(**{**found, "mark": Mark(**found["mark"])})
            enough = (self.folder / "lengths.bin").stat().st_size >= 8 * state.documents
            enough = enough and self.tokens.stat().st_size >= state.tokens * self._itemsize
            enough = enough and (self.mask is None or self._scored.stat().st_size >= state.tokens)
            lengths = np.fromfile(self.folder / "lengths.bin", "<i8", state.documents) if enough else np.empty(0)
            hashes = (self.folder / "hashes.bin").stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            return None
        whole = enough and lengths.sum() == state.tokens and (not hashes or hashes >= _HASH * state.documents)
        return state if whole else None

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._output, error) from error
