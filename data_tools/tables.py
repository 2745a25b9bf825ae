"""Read the rows of parquet and arrow files (the package pyarrow), a batch at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_tools.files import damage
from data_tools.selection import Select
from megazero.base.errors import UserError
from megazero.data.tokenizers.common import require_extra

_ROWS = 256  # decoded at a time


def rows(path: Path, select: Select) -> Iterator[dict[str, Any] | Exception]:
    """Yield the rows of a table, with the selected columns only.

    For a row with a value that Python cannot hold, such as text that is not UTF-8, the error is yielded instead.

    Raises:
        UserError: 162, pyarrow is not installed; 213, a column is missing.
        DamagedError: the file is not a table, or is cut off.
    """
    require_extra("pyarrow", "text", path)
    with damage(Exception):
        for batch in _batches(path, select):
            yield from (_row(batch, i) for i in range(batch.num_rows))


def _row(batch: Any, i: int) -> dict[str, Any] | Exception:
    try:
        row = batch.slice(i, 1)
        row.validate(full=True)  # in a damaged file a text may be outside of its buffer
        return row.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return error


def _batches(path: Path, select: Select) -> Iterator[Any]:
    """Yield the batches of a table (pyarrow.RecordBatch)."""
    import pyarrow

    if path.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            yield from file.iter_batches(_ROWS, columns=_columns(file.schema_arrow.names, select, path))
        return
    with pyarrow.OSFile(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:  # the streaming format, which has no footer
            source.seek(0)
            reader = batches = pyarrow.ipc.open_stream(source)
        columns = _columns(reader.schema.names, select, path)
        for batch in batches:
            yield from (batch.select(columns).slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))


def _columns(names: list[str], select: Select, path: Path) -> list[str]:
    """Return the columns that are needed. Raises UserError 213: one is missing."""
    wanted = dict.fromkeys(name if name in names else name.split(".")[0] for name in select.fields)
    if odd := next((name for name in wanted if name not in names), None):
        what = f'expected a column "{odd}", got {", ".join(names)[:80]}'
        raise UserError(213, what, "choose another --field", where=path)
    return list(wanted)
