"""Keep the finished parts of a command in PREFIX.unfinished/, where the same command finds them when run again.

    job                          identifies the command line
    000012.bin .idx .mask        token files of the 13th part, a pair like any other
    000012.done                  its counts; written last

A part without counts is made again. When all parts are done, `preprocess` joins them like any other folder of shards.
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

_BYTES = 1 << 30  # the largest .done file, which holds the hashes of the part's documents


class Unfinished:
    """The folder of the finished parts of a command; the same command, run again, continues after them.

    Args:
        output: prefix of the token files.
        job: identifies everything that the result depends on.

    Attributes:
        folder: where the parts are.
        done: the counts of the finished parts, in order.

    Raises:
        UserError: 208, the folder cannot be written, or another command is using it.
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
                job.unlink(missing_ok=True)  # first: if the cleanup is killed, the parts that remain match no command
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
        """Record that this part is finished; its files must be on the disk. Raises UserError 208."""
        write_atomically(Path(f"{self.prefix()}.done"), json.dumps(asdict(counts)).encode())
        self.done.append(counts)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not any(counts.documents for counts in self.done):  # nothing to continue from
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
