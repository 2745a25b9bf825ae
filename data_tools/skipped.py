"""Count and list the files and records that are bad, where the user has asked to leave them out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megazero.base.atomic import write_atomically
from megazero.base.errors import UserError

LISTED, _SHOWN = 10_000, 5  # in the file, and on standard error


@dataclass
class Skipped:
    """The files and lines that were skipped of a corpus.

    Attributes:
        count: number of files and lines.
        lines: the reasons, for the first ones.
    """

    count: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, error: UserError) -> None:
        """Count one more file or line that is bad."""
        self.count += 1
        if len(self.lines) < LISTED:
            self.lines.append(f"{error.where}: {error.what}")

    def tell(self, output: Path, say: Callable[[str], object]) -> None:
        """Say what was skipped, and leave the list next to the output; no list where nothing was.

        Raises:
            UserError: 208, the list cannot be written.
        """
        path = output.with_name(output.name + ".skipped.txt")
        if not self.count:
            path.unlink(missing_ok=True)  # of an earlier run
            return
        more = [f"... and {self.count - len(self.lines):,} more"] if self.count > len(self.lines) else []
        write_atomically(path, "".join(f"{line}\n" for line in (*self.lines, *more)).encode(errors="backslashreplace"))
        for line in self.lines[:_SHOWN]:
            say(f"skipped {line}")
        say(f"skipped {self.count:,} in all, which are listed in {path}")
