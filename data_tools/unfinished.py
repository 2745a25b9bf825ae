"""Keep the finished parts of a command where another one, of the same words, finds them: PREFIX.unfinished/.

    job                          which command line it is
    000012.bin .idx .mask        token files of the 13th part, a pair like any other
    000012.done                  its counts; written last

A part that has no counts is made again. When all are there, `preprocess` joins them as any other folder of shards.
"""

import fcntl
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from data_tools.counts import Counts
from megazero.base.errors import UserError
from megazero.base.files import write_atomically, writing
from megazero.base.reading import parse_object, read_file

_BYTES = 1 << 30  # of the counts of a part, with the hashes of its documents


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
        with writing(self._output):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                what = "is being written by another command"
                raise UserError(208, what, "wait for it, or give another --output", where=self._output) from None
            job = self.folder / "job"
            if not job.exists() or job.read_text() != self._job:
                job.unlink(missing_ok=True)  # first: a killed cleaning leaves parts that no command believes
                for path in {*self.folder.iterdir()} - {self.folder / "lock"}:
                    path.unlink()
                write_atomically(job, self._job.encode())
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not any(counts.documents for counts in self.done):  # nothing to go on from
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
