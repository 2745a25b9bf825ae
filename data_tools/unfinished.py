"""Keep the finished parts of a command where another one, of the same words, finds them: PREFIX.unfinished/.

    job                          which command line it is
    000012.bin .idx .mask        token files of the 13th part, a pair like any other
    000012.done                  its counts; written last

A part that has no counts is made again. When all are there, `preprocess` joins them as any other folder of shards.
"""

import fcntl
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from megazero.base.atomic import write_atomically, write_error
from megazero.base.errors import UserError
from megazero.base.reading import parse_object, read_file

_BYTES = 1 << 30  # of the counts of a part, with the hashes of its documents


@dataclass
class Counts:
    """The counts of some documents.

    Attributes:
        documents, tokens: in the files; tokens count the ends of documents, too.
        empty: documents without a token, which are left out.
        bytes, id_bytes: of the text, and those that its ids stand for.
        longest: tokens of the longest document.
        scored: tokens that are trained on.
        cut: documents that were so long that they were cut where that may change ids.
        filtered, duplicates, rejected: records that did not pass, had been there before, were bad.
        skipped: the reasons, for the first bad ones.
        digests: of the documents, where duplicates are looked for: 32 hex digits each.
    """

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bytes: int = 0
    id_bytes: int = 0
    longest: int = 0
    scored: int = 0
    cut: int = 0
    filtered: int = 0
    duplicates: int = 0
    rejected: int = 0
    skipped: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        """Add the counts of other documents."""
        longest = max(self.longest, other.longest)
        for name, value in vars(other).items():
            if isinstance(value, list):
                getattr(self, name).extend(value)
            else:
                setattr(self, name, getattr(self, name) + value)
        self.longest = longest


class Unfinished:
    """The folder of a command that is under way, which goes on where one of the same words has ended.

    Args:
        output: prefix of the token files.
        job: all that the result depends on, in words.

    Attributes:
        folder: where the parts are.
        done: the counts of the finished parts, in order.

    Raises:
        UserError: 208, it cannot be written, or another command is at work there.
    """

    def __init__(self, output: Path, job: str):
        self.folder, self._job, self._output = Path(f"{output}.unfinished"), job, output
        self.done: list[Counts] = []

    def __enter__(self) -> "Unfinished":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            job = self.folder / "job"
            if not job.exists() or job.read_text() != self._job:
                job.unlink(missing_ok=True)  # first: a killed cleaning leaves parts that no command believes
                for path in self.folder.iterdir():
                    if path.name != "lock":
                        path.unlink()
                write_atomically(job, self._job.encode())
        except BlockingIOError:
            self._lock.close()
            what = "is being written by another command"
            raise UserError(208, what, "wait for it, or give another --output", where=self._output) from None
        except OSError as error:
            raise write_error(self._output, error) from error
        while (path := Path(f"{self.prefix()}.done")).exists():
            self.done.append(Counts(**parse_object(read_file(path, _BYTES))))
        return self

    def prefix(self) -> Path:
        """Return the prefix of the first part that is not finished."""
        return self.folder / f"{len(self.done):06d}"

    def finish(self, counts: Counts) -> None:
        """Note that this part is finished: its files are on the disk. Raises UserError 208."""
        write_atomically(Path(f"{self.prefix()}.done"), json.dumps(asdict(counts)).encode())
        self.done.append(counts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not any(counts.documents for counts in self.done):  # nothing to go on from
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
