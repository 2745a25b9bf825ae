"""Read the rows of parquet and arrow files (the package pyarrow), a batch at a time.

A table of kilobytes can hold gigabytes: pages are compressed, and equal or similar values are stored once. A reader
allocates what the header of a page says, so these headers are read first, and they decide how many rows are decoded at
a time; the sizes at the end of the file may say anything. The text that comes out is counted as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_tools.files import DamagedError, require_package
from data_tools.page_sizes import largest_pages
from data_tools.selection import Taken
from megazero.base.errors import UserError

_ROWS, _BATCH_BYTES = 1024, 256 << 20  # decoded at a time, at least one row
_PAGE_BYTES = 512 << 20  # the largest pages that are written on purpose have 500 MB
_SMALL, _DENSITY = 1 << 30, 1000  # more characters are text only if the file has a thousandth of them in bytes


def rows(path: Path, select: Taken, skip: int) -> Iterator[dict[str, Any] | Exception]:
    """Yield the rows of a table after the first `skip`, with the columns that are looked at.

    A row with a value that Python cannot hold, such as text that is not UTF-8, comes as the error.

    Raises:
        UserError: 162, pyarrow is not installed; 213, a column is not there.
        DamagedError: the file is no table, is cut off, or has a page that is too large.
    """
    require_package("pyarrow", path)
    with _damage():
        for batch in _batches(path, select):
            for i in range(skip, batch.num_rows):
                yield _row(batch, i)
            skip = max(skip - batch.num_rows, 0)


def most_text(path: Path) -> int:
    """Return the characters of text that a table has at most, unless it was made to expand."""
    return max(_SMALL, _DENSITY * path.stat().st_size)


def _row(batch: Any, i: int) -> dict[str, Any] | Exception:
    try:
        row = batch.slice(i, 1)
        row.validate(full=True)  # in a damaged file a text may lie outside of its buffer
        return row.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return error


def _batches(path: Path, select: Taken) -> Iterator[Any]:
    """Yield the batches of a table (pyarrow.RecordBatch)."""
    import pyarrow

    if path.suffix == ".parquet":
        import pyarrow.parquet

        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            columns = _columns(file.schema_arrow.names, select, path)
            for group, largest in enumerate(largest_pages(raw, columns)):
                yield from file.iter_batches(_rows_at_once(largest), [group], columns)
        return
    with pyarrow.OSFile(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:  # the other form, without a footer
            source.seek(0)
            reader = batches = pyarrow.ipc.open_stream(source)
        columns = _columns(reader.schema.names, select, path)
        for batch in batches:
            yield from (batch.select(columns).slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))


def _rows_at_once(largest: int) -> int:
    """Return how many rows fit into memory if each is as large as the largest page. Raises DamagedError: not one."""
    if largest > _PAGE_BYTES:
        raise DamagedError(f"has a page of {largest:,} bytes, the most that are read are {_PAGE_BYTES:,}")
    return min(_ROWS, _BATCH_BYTES // max(largest, 1)) or 1


def _columns(names: list[str], select: Taken, path: Path) -> list[str]:
    """Return the columns that are needed. Raises UserError 213."""
    wanted = dict.fromkeys(name if name in names else name.split(".")[0] for name in select.paths)
    if odd := next((name for name in wanted if name not in names), None):
        what = f'expected a column "{odd}", got {", ".join(names)[:80]}'
        raise UserError(213, what, "choose another --field, or mend --where", where=path)
    return list(wanted)


@contextmanager
def _damage() -> Iterator[None]:
    """Turn whatever pyarrow says of a damaged file into DamagedError."""
    try:
        yield
    except (UserError, DamagedError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # the system's
            raise
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise DamagedError(f"damaged: {said}") from error
