"""Open text files, plain or compressed: .gz, .zst (the package pyarrow); tell the kind of a file by its name."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megazero.base.errors import UserError
from megazero.data.tokenizers.common import require_extra

COMPRESSED, TABLES = (".gz", ".zst"), (".parquet", ".arrow")


class DamagedError(OSError):
    """An error for a file that is cut off or not of the kind that its name says; `strerror` is the reason."""

    def __init__(self, what: str):
        super().__init__(0, what)


def kind_of(path: Path) -> str:
    """Return the suffix that tells the kind of a file, without .gz and .zst."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


@contextmanager
def damage(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds, which a library raises for a damaged file, into DamagedError."""
    try:
        yield
    except (UserError, DamagedError):
        raise
    except kinds as error:
        if isinstance(error, OSError) and error.errno:  # an error of the system
            raise
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise DamagedError(f"damaged or cut off: {said}") from error


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file to read its text. Raises OSError; reading in the context raises DamagedError, too.

    Raises:
        UserError: 162, the package that decompresses it is not installed.
    """
    with damage(EOFError, zlib.error, OSError):
        if path.suffix == ".zst":
            require_extra("pyarrow", "text", path)
            import pyarrow

            with pyarrow.input_stream(str(path), compression="zstd") as stream:
                yield io.BufferedReader(stream, 1 << 17)
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                yield file
