"""Turn errors into one line and an exit code, for every command of this folder.

0    done
1    an error in the data or of the disk  (MZ-2xx)
2    an error in the command line         (MZ-190)
130  interrupted
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from data_tools.corpus import TEXT_SUFFIXES
from data_tools.places import Part
from megazero.base.answers import fail, flush_output
from megazero.base.command_line import at_least
from megazero.base.errors import UserError

positive = at_least(1, int, 2**31 - 1)  # the type of an option that counts something


class Parser(argparse.ArgumentParser):
    """A parser that reports its errors in one line with a code, like all other errors."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line with MZ-190."""
        raise UserError(190, message, f"see `{self.prog} --help`", where=self.verb)

    @property
    def verb(self) -> str:
        """Return the name of the command, without that of the program."""
        return self.prog.removeprefix("megazero ")


def prefix(text: str) -> Path:
    """Return the prefix of a data set from an option; "data/" means data.bin and data.idx."""
    if Path(text).name in ("", ".."):
        raise argparse.ArgumentTypeError(f"expected a prefix such as data/train, got {text!r}")
    return Path(text)


def suffix(text: str) -> str:
    """Return a suffix of file names from an option."""
    if re.fullmatch(r"\.[^\s/]+", text) is None:
        raise argparse.ArgumentTypeError(f"expected a suffix such as .txt, with its dot, got {text[:20]!r}")
    return text


def part(text: str) -> Part:
    """Return the part of a corpus from an option such as 3/16."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, such as 3/16, got {text[:20]!r}")
    return Part(int(found[1]), int(found[2]))


def add_inputs(parser: Parser) -> None:
    """Add the options that choose the text; they mean the same in every command that reads text."""
    ends = ".txt .md .py .jsonl, each also with .gz or .zst, .parquet .arrow"
    what = ".jsonl (a document per line), .parquet and .arrow (a document per row), any other file (one document), "
    what += f"or a folder (its files {ends})"
    parser.add_argument("--input", nargs="+", required=True, type=Path, metavar="PATH", help=what)
    path = "field of lines and rows that holds the text; a.b is b in the object a; several are joined by newlines"
    parser.add_argument("--field", "--key", nargs="+", default=["text"], metavar="PATH", help=f"{path} (default: text)")
    instead = f"of a folder, take files with these suffixes, instead of {ends}"
    parser.add_argument("--suffix", nargs="+", type=suffix, default=TEXT_SUFFIXES, metavar=".END", help=instead)
    bad = "skip, count and list files that are not UTF-8 and damaged lines of a .jsonl, instead of refusing them"
    parser.add_argument("--skip-bad", action="store_true", help=bad)


def add_output(parser: Parser) -> None:
    """Add the option that names the data set to write."""
    what = "writes PREFIX.bin and PREFIX.idx"
    parser.add_argument("--output", required=True, type=prefix, metavar="PREFIX", help=what)


def run(
    command: Callable[[argparse.Namespace], None],
    parser: Parser,
    argv: Sequence[str] | None,
    after_interrupt: str = "no partial file is left",
) -> int:
    """Parse, run, and turn errors into a line on stderr and an exit code; Ctrl-C prints `after_interrupt`."""
    try:
        command(parser.parse_args(argv))
    except UserError as error:
        return fail(error, error.exit_code)
    except KeyboardInterrupt:
        return fail(f"{parser.prog}: interrupted, {after_interrupt}", 130)
    except OSError as error:
        what, where = f"system error: {error.strerror}", error.filename or parser.verb
        return fail(UserError(218, what, "check the disk and the permissions", where=where), 1)
    finally:
        flush_output()
    return 0
