"""Read the rows of parquet and arrow files (the package pyarrow), a batch at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_tools.files import DamagedError, require_package
from data_tools.selection import Taken
from megazero.base.errors import UserError

_ROWS = 1024  # in memory at a time


def rows(path: Path, select: Taken, skip: int) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a table behind the first `skip`, with the columns that are looked at; None: not UTF-8.

    Raises:
        UserError: 162, pyarrow is not installed; 213, a column is not there.
        DamagedError: the file is no table, or is cut off.
    """
    require_package("pyarrow", path)
    with _damage():
        for batch in _batches(path, select):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            batch, skip = batch.slice(skip), 0
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:
                for i in range(batch.num_rows):
                    yield _row(batch.slice(i, 1))


def _row(batch: Any) -> dict[str, Any] | None:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError:
        return None


def _batches(path: Path, select: Taken) -> Iterator[Any]:
    """Yield the batches of a table (pyarrow.RecordBatch)."""
    import pyarrow

    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(_ROWS, columns=_columns(file.schema_arrow.names, select, path))
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


def _columns(names: list[str], select: Taken, path: Path) -> list[str]:
    """Return the columns that are needed. Raises UserError 213."""
    wanted = dict.fromkeys(name if name in names else name.split(".")[0] for name in select.paths)
    if odd := next((name for name in wanted if name not in names), None):
        what = f'expected a column "{odd}", got {", ".join(names)[:80]}'
        raise UserError(213, what, "choose another --field, or mend --where", where=path)
    return list(wanted)


@contextmanager
def _damage() -> Iterator[None]:
    """Turn what pyarrow says of a damaged file into DamagedError."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        raise DamagedError(f"damaged: {' '.join(str(error).split())[:120]}") from error
    except OSError as error:
        if error.errno:  # the system's
            raise
        raise DamagedError(f"damaged: {' '.join(str(error).split())[:120]}") from error
