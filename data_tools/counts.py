"""Count documents, tokens and what was left out; list the files and records that are bad."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.files import write_atomically

LISTED, _SHOWN = 10_000, 5  # in the file, and on standard error


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
        duplicates, rejected: records that had been there before, were bad.
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
    duplicates: int = 0
    rejected: int = 0
    skipped: list[str] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def add(self, other: "Counts") -> None:
        """Add the counts of other documents."""
        longest = max(self.longest, other.longest)
        for name, value in vars(other).items():
            total = getattr(self, name)
            total += value  # a list in place
            setattr(self, name, total)
        self.longest = longest

    def skip(self, error: UserError) -> None:
        """Count one more file or record that is bad."""
        self.rejected += 1
        if len(self.skipped) < LISTED:
            self.skipped.append(f"{error.where}: {error.what}")

    def list_skipped(self, output: Path, say: Callable[[str], object]) -> None:
        """Say what was skipped, and leave the list next to the output; no list where nothing was.

        Raises:
            UserError: 208, the list cannot be written.
        """
        path, lines = output.with_name(output.name + ".skipped.txt"), self.skipped[:LISTED]
        if not self.rejected:
            path.unlink(missing_ok=True)  # of an earlier run
            return
        for line in lines[:_SHOWN]:
            say(f"skipped {line}")
        if self.rejected > len(lines):
            lines.append(f"... and {self.rejected - len(lines):,} more")
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        say(f"skipped {self.rejected:,} in all, which are listed in {path}")
