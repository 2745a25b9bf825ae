"""Reads a .wandb file back: LevelDB log framing (blocks of 32 KiB; crc, length, type) around the library's records."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Recorded:
    name: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    finished: bool = False


def read(path: Path) -> Recorded:
    """What a run wrote; a torn tail is left out."""
    from wandb.proto import wandb_internal_pb2

    found = Recorded()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.name = record.run.display_name
            found.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "config":
            found.config |= {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.config.update
            }
        elif kind == "history":
            items = record.history.item
            found.history.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        elif kind == "exit":
            found.finished = True
    return found


def _records(content: bytes) -> Iterator[bytes]:
    offset, parts = HEADER, b""  # the file begins with a header of its own
    while offset + HEADER <= len(content):
        left = BLOCK - offset % BLOCK
        _, length, kind = struct.unpack("<IHB", content[offset : offset + HEADER])
        if left < HEADER or (kind, length) == (0, 0):
            offset += left
            continue
        data = content[offset + HEADER : offset + HEADER + length]
        if len(data) < length:
            return
        offset += HEADER + length
        parts = data if kind in (FULL, FIRST) else parts + data
        if kind in (FULL, LAST):
            yield parts
