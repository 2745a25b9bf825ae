"""Count documents, tokens and records that were left out; list the bad files and records."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.files import write_atomically

LISTED, _SHOWN = 10_000, 5  # bad records in the file, and on standard error


@dataclass
class Counts:
    """The counts of some documents.

    Attributes:
        documents, tokens: in the token files; tokens include the end-of-document ids.
        empty: documents without a token, which are left out.
        bytes, id_bytes: bytes of the text, and bytes that its ids stand for.
        longest: tokens of the longest document.
        scored: tokens that are trained on.
        cut: documents so long that they were cut where a cut may change ids.
        duplicates, rejected: records left out as duplicates, and as bad.
        skipped: the reasons for the first bad ones.
        digests: hashes of the documents, 32 hex digits each, if duplicates are left out.
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
            total += value  # extends a list in place
            setattr(self, name, total)
        self.longest = longest

    def skip(self, error: UserError) -> None:
        """Count one more file or record that is bad."""
        self.rejected += 1
        if len(self.skipped) < LISTED:
            self.skipped.append(f"{error.where}: {error.what}")

    def list_skipped(self, output: Path, say: Callable[[str], object]) -> None:
        """Report what was skipped, and list it in a file next to the output; write no file if nothing was skipped.

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
