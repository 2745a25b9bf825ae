"""Read how large the pages of a parquet file become, before anything of them is decompressed.

A reader allocates what the header of a page says. The sizes at the end of the file are only claims, and pyarrow ends
the process over some that are damaged, so both are read here: Thrift's compact protocol is a few lines. Structures
become dictionaries by the numbers of their fields. Source: parquet.thrift, whose names are in the comments.
"""

from collections.abc import Collection, Iterator
from typing import Any, BinaryIO

from data_tools.files import DamagedError


def largest_pages(file: BinaryIO, columns: Collection[str]) -> list[int]:
    """Return for each row group the bytes of the largest page of some columns. Raises DamagedError."""
    end = file.seek(-8, 2)
    file.seek(end - int.from_bytes(file.read(4), "little"))
    try:
        groups = _structure(file)[4]  # FileMetaData.row_groups
        chunks = [[column[3] for column in group[1]] for group in groups]  # RowGroup.columns, ColumnChunk.meta_data
        return [max(_sizes(file, group, columns), default=0) for group in chunks]
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError("damaged: a structure without its fields") from error


def _sizes(file: BinaryIO, chunks: list[dict[int, Any]], columns: Collection[str]) -> Iterator[int]:
    """Yield the uncompressed size of each page."""
    for chunk in chunks:
        path = b".".join([*chunk[3], b""]).decode()  # ColumnMetaData.path_in_schema
        if not path.startswith(tuple(f"{name}." for name in columns)):
            continue
        place = min(chunk[9], chunk.get(11) or chunk[9])  # data_page_offset, dictionary_page_offset
        stop = place + chunk[7]  # total_compressed_size
        while 0 <= place < stop:
            file.seek(place)
            header = _structure(file)
            if min(header[2], header[3]) < 0:  # PageHeader.uncompressed_page_size, compressed_page_size
                raise DamagedError("damaged: a page of less than no bytes")
            yield header[2]
            place = file.tell() + header[3]


def _structure(file: BinaryIO) -> dict[int, Any]:
    """Return a structure: a byte with the step to the next field and its type for each, then 0."""
    found, field = dict[int, Any](), 0
    while head := _byte(file):
        step, kind = divmod(head, 16)
        field = field + step if step else _integer(file)
        found[field] = kind == 1 if kind in (1, 2) else _value(file, kind)  # a boolean is its own type
    return found


def _value(file: BinaryIO, kind: int) -> Any:
    if kind in (1, 2, 3):
        return _byte(file)
    if kind in (4, 5, 6):
        return _integer(file)
    if kind == 7:
        return bytes(_byte(file) for _ in range(8))
    if kind == 8:
        return file.read(_varint(file))
    if kind in (9, 10):
        size, inner = divmod(_byte(file), 16)
        return [_value(file, inner) for _ in range(_varint(file) if size == 15 else size)]
    if kind == 12:
        return _structure(file)
    raise DamagedError("damaged: a structure of an unknown type")


def _integer(file: BinaryIO) -> int:
    value = _varint(file)
    return (value >> 1) ^ -(value & 1)


def _varint(file: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise DamagedError("damaged: a number without an end")


def _byte(file: BinaryIO) -> int:
    if not (byte := file.read(1)):
        raise DamagedError("cut off inside a structure")
    return byte[0]
