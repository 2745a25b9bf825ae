"""The base class of tokenizers, and what is common to all kinds: read a file, or refuse it with a one-line error."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megazero.base.errors import UserError
from megazero.base.reading import looked_up, parse_object, read_file

FILE_BYTES = 64 << 20  # of a tokenizer's file; the largest published ones have 35 MB
# Files next to a tokenizer's, as transformers writes them.
CONFIG, CHAT_TEMPLATE, GENERATION = "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
BESIDE_BYTES = 4 << 20  # the largest size of each of these
MOST_IDS = 1 << 24  # bounds the table of sizes, which reaches to the largest id, even if the file has few ids
SPACE_MARK = "\u2581"  # stands for a space in SentencePiece's pieces
_IN_USE = ("its library fails", "repair the tokenizer, or leave that text out")
# Has all that lossy tokenizers are known to change: spaces, line ends, the mark, characters that Unicode normalises.
_PROBE = "  a\r\n\tB  \u2581 \u00e9\u4e2d\U0001f600\x00 e\u0301 \ufb01 <s> C "


class Tokenizer(ABC):
    """The base class of every kind of tokenizer.

    Attributes:
        path: the file.
        vocab_size: ids are in [0, vocab_size).
        eod: the id that ends a document.
        bos: the id that begins a text; eod if there is none.
        specials: special ids by their names, including eod and bos; these names in a text are plain text.
        lossless: decoding the ids of a text gives the same text, and the bytes of the ids add up to those of the text.
        cuts_after_newline: a text may be cut after any newline: its ids are those of its parts, end to end.
        fingerprint: 16 hex digits of the content; equal fingerprints mean equal ids.
        files: names and contents of files from which the same tokenizer can be opened in another folder.
    """

    path: Path
    vocab_size: int
    eod: int
    bos: int
    specials: Mapping[str, int]
    lossless: bool
    cuts_after_newline = False
    fingerprint: str
    files: Mapping[str, bytes]
    _sizes: np.ndarray

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without end-of-document.

        Raises:
            UserError: 212, the text has half a surrogate pair; 209, the library fails on the text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"character {error.start:,} of a text is half of a surrogate pair, not a character"
            raise UserError(212, what, "give text that UTF-8 can encode") from error
        with guarded(self.path, *_IN_USE):
            return self._encode(text)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without special ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: 209, the library fails on the ids.
        """
        with guarded(self.path, *_IN_USE):
            return self._decode(ids)

    def token_bytes(self) -> np.ndarray:
        """Return the UTF-8 bytes of text that each id stands for, int64 [vocab_size]; 0 for special ids.

        If the tokenizer is lossless, token_bytes()[encode(text)].sum() == len(text.encode()), so the mean loss of a
        text in bits per byte is sum(loss in nats) / ln 2 / sum(token_bytes of its targets).
        """
        return self._sizes

    def _open(
        self, path: str | Path, read: Callable[[bytes], None], what: str, do: str, extra: tuple[str, str] | None
    ) -> None:
        """Read the tokenizer from its file.

        Args:
            read: sets all attributes from the content.
            what, do: the texts of the error for content that cannot be read.
            extra: the package that reads it, and the extra of megazero with the package; None: it needs no package.

        Raises:
            UserError: 209, the file is missing or invalid; 162, the package is not installed.
        """
        self.path = Path(path)
        content = read_tokenizer(self.path)
        if extra is not None:
            require_extra(*extra, self.path)
        with guarded(self.path, what, do):
            read(content)

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def _gives_back(self) -> bool:
        """Return whether decoding the ids of a test text gives the text, and their bytes add up to the text's."""
        ids = self.encode(_PROBE)
        return self.decode(ids) == _PROBE and int(self._sizes[ids].sum()) == len(_PROBE.encode())

    def _require_size(self) -> None:
        """Refuse a number of ids that no vocabulary has. Raises UserError 209."""
        if not 0 < self.vocab_size <= MOST_IDS:
            what = f"expected 1 to {MOST_IDS:,} ids, got {self.vocab_size:,}"
            raise UserError(209, what, "give a complete tokenizer", where=self.path)


@contextmanager
def guarded(path: Path, what: str, do: str) -> Iterator[None]:
    """Turn an exception or a Rust panic of a tokenizer's library into UserError 209 with text `what`, advice `do`."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise  # a signal that ends the process
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(209, f"{what}: {said}", do, where=path) from error


def read_tokenizer(path: Path) -> bytes:
    """Return the content of a tokenizer's file. Raises UserError 209: it is missing, empty or too large."""
    try:
        content = read_file(path, FILE_BYTES)
    except OSError as error:
        what = f"tokenizer cannot be read: {error.strerror}{looked_up(path)}"
        raise UserError(209, what, how_to_make(path), where=path) from error
    if not content:
        raise UserError(209, "expected a tokenizer, got an empty file", how_to_make(path), where=path)
    return content


def config_beside(path: Path, name: str = CONFIG) -> dict[str, Any]:
    """Return the content of a JSON object next to a file; {}: there is none. Raises UserError 209: damaged."""
    neighbour = path.with_name(name)
    if not neighbour.exists():
        return {}
    try:
        return parse_object(read_file(neighbour, BESIDE_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(209, f"cannot be read: {error}", "repair or remove it", where=neighbour) from error


def how_to_make(path: Path) -> str:
    """Return the advice that names the command to make a missing tokenizer."""
    quickstart = "run `make data` in a checkout, or " if "data/quickstart" in path.as_posix() else "run "
    return f"{quickstart}`megazero tokenizer --input TEXT --vocab N --output MODEL`"


def require_extra(package: str, extra: str, path: Path) -> None:
    """Refuse a file that needs a package which is not installed. Raises UserError 162."""
    if find_spec(package) is None:
        what = f"reading this file needs the package {package}, which is not installed"
        raise UserError(162, what, f"run `pip install {package}`, or install megazero[{extra}]", where=path)
