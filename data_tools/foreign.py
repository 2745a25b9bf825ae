"""Read token files of other projects; `merge.py` copies them into our format, the only one that training reads.

    X.ds    datatrove's, which nanotron trains on. X.ds has ids of 16 or 32 bits; X.ds.index the token at which each
            document ends, u64; X.ds.loss (it may be missing) a byte for each token, 1 if it counts in the loss.
    X.npy   OLMo-core's and Dolma's: raw ids despite the name, of the smallest unsigned type that holds the
            tokenizer's ids.
    X.bin   without an index: nanoGPT's (raw ids of 16 bits) or llm.c's, which begins with 256 int32: 20240520, 1 (ids
            of 16 bits) or 20240801, 7 (of 32 bits), then the number of ids.

All are little endian. In .npy and .bin files a document ends with the end-of-document id; ids after the last such id
are a document too. (In llm.c's files that id begins a document.)

Sources: huggingface/datatrove, src/datatrove/pipeline/tokens/tokenizer.py; allenai/OLMo-core,
src/olmo_core/data/utils.py; karpathy/nanoGPT, data/openwebtext/prepare.py; karpathy/llm.c, dev/data/data_common.py.
"""

from pathlib import Path

import numpy as np
import xxhash

from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.data.data_file import DataFile
from megazero.data.token_dataset import TokenDataset
from megazero.data.tokenizer import Tokenizer

_LLM_C_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_BLOCK = 1 << 22  # tokens searched at a time


class ForeignDataset(TokenDataset):
    """Token files of another project.

    Args:
        path: the file of the ids.
        ids: memory-mapped token ids.
        ends: the token at which each document ends, int64.
        scored: a byte for each token, 0 if it is not trained on; None: all are trained on.
    """

    def __init__(self, path: Path, ids: np.ndarray, ends: np.ndarray, scored: np.ndarray | None = None):
        self.prefix = self.bin_path = path
        self.dtype, self.num_tokens, self.num_documents = ids.dtype, len(ids), len(ends)
        self._ids, self._offsets, self._scored = ids, np.concatenate([[0], ends]), scored
        self.mask_digest = None if scored is None else xxhash.xxh3_64_hexdigest(scored.data)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return token ids [stop - start]."""
        return np.array(self._ids[start:stop])

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """Return where documents [first, stop) start, in tokens: int64."""
        return self._offsets[first:stop]

    def scored(self, start: int, stop: int) -> np.ndarray:
        """Return which of the tokens [start, stop) count in the loss."""
        return np.ones(stop - start, bool) if self._scored is None else self._scored[start:stop].astype(bool)


def is_foreign(path: Path) -> bool:
    """Return whether a path names files of another project. A missing X.bin does not: prefix X was probably meant."""
    if Path(f"{path}.idx").exists():
        return False
    return path.suffix in (".ds", ".npy") or (path.suffix == ".bin" and path.exists())


def open_foreign(path: Path, tokenizer: Tokenizer | None) -> TokenDataset:
    """Open token files of another project; the ends of all documents are held in memory, 8 bytes each.

    Args:
        tokenizer: the tokenizer that made the ids; None: unknown.

    Raises:
        UserError: 201, a file is missing, or is half of a pair; 202, numpy's own format; 204, files contradict each
            other; 222, a tokenizer is needed; 223, the ids are not the tokenizer's; 225, an invalid loss file.
    """
    if not path.exists():
        raise UserError(201, f"no such token file{looked_up(path)}", "give a file of token ids", where=path)
    if path.suffix == ".ds":
        return _open_datatrove(path)
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        what = f"is half of a pair with {path.with_suffix('.idx').name}"
        raise UserError(201, what, f"give the prefix {path.with_suffix('')}", where=path)
    if tokenizer is None:
        what = f"the id that ends a document is unknown: a {path.suffix} file has only ids"
        raise UserError(222, what, "give the tokenizer that it was made with (--tokenizer)", where=path)
    return _open_headerless(path, tokenizer)


def _bytes(path: Path) -> np.ndarray:
    """Return the bytes of a file, uint8, memory-mapped unless it is empty. Raises UserError 201: unreadable."""
    return np.memmap(path, np.uint8, "r") if DataFile(path, "tokens", 204).size else np.empty(0, np.uint8)


def _open_datatrove(path: Path) -> TokenDataset:
    index, loss = Path(f"{path}.index"), Path(f"{path}.loss")
    file, raw = _bytes(path), _bytes(index)
    ends = raw[: len(raw) // 8 * 8].view("<i8")
    count = int(ends[-1]) if len(ends) else 0
    if len(raw) % 8 or (np.diff(ends, prepend=0) < 0).any() or len(file) not in (2 * count, 4 * count):
        what = f"expected 8 bytes for each document, with rising ends, in {index.name}, and 2 or 4 for each of "
        what += f"{count:,} tokens, got {len(raw):,} and {len(file):,} bytes"
        raise UserError(204, what, "copy its files again, or tokenize again", where=path)
    scored = _bytes(loss) if loss.exists() else None
    if scored is not None and (len(scored) != count or (scored > 1).any()):
        what = f"expected a byte of 0 or 1 for each of {count:,} tokens, got {len(scored):,} bytes or others"
        raise UserError(225, what, "copy it again, or tokenize again", where=loss)
    return ForeignDataset(path, file.view("<u4" if count and len(file) == 4 * count else "<u2"), ends, scored)


def _open_headerless(path: Path, tokenizer: Tokenizer) -> TokenDataset:
    raw = _bytes(path)
    if raw[:6].tobytes() == np.lib.format.MAGIC_PREFIX:
        raise UserError(202, "expected raw ids, got numpy's own format", "write them with ndarray.tofile", where=path)
    dtype, at, count = _layout(path, raw, tokenizer.vocab_size)
    if at + count * dtype.itemsize != len(raw):
        what = f"expected {count:,} {dtype} tokens after byte {at:,}, got {len(raw) - at:,} bytes"
        raise UserError(204, what, "copy it again, or give the tokenizer that it was made with", where=path)
    ids = raw[at:].view(dtype)
    start, bits = ids[:_BLOCK], 8 * ids.itemsize
    if len(start) >= 16 and bits < 64 and start.any() and not start[1::2].any():
        what = f"expected ids of {bits} bits for the tokenizer, got 0 for every second one: they have {2 * bits}"
        raise UserError(223, what, "give the tokenizer that it was made with (--tokenizer)", where=path)
    blocks = range(0, len(ids), _BLOCK)
    ends = np.concatenate([np.flatnonzero(ids[at : at + _BLOCK] == tokenizer.eod) + at + 1 for at in blocks] or [[]])
    if len(ids) and (not len(ends) or ends[-1] != len(ids)):
        ends = np.append(ends, len(ids))
    return ForeignDataset(path, ids, ends.astype(np.int64))


def _layout(path: Path, raw: np.ndarray, vocab: int) -> tuple[np.dtype, int, int]:
    """Return (type of raw ids, byte offset of the first, their number). Raises UserError 223: `vocab` does not fit."""
    if path.suffix == ".npy":
        kind = next(kind for kind in ("<u1", "<u2", "<u4", "<u8") if vocab - 1 <= np.iinfo(kind).max)
        return np.dtype(kind), 0, len(raw) // np.dtype(kind).itemsize
    magic, version, count = raw[:12].view("<i4").tolist() if len(raw) >= 1024 else (0, 0, 0)
    if (magic, version) in _LLM_C_KINDS:
        return np.dtype(_LLM_C_KINDS[magic, version]), 1024, count
    if vocab > 1 << 16:
        what = f"expected ids of 16 bits in a .bin without an index, got a tokenizer of {vocab:,} ids"
        do = "rename it .npy if it is raw ids of 32 bits, or give the prefix of a .bin and .idx"
        raise UserError(223, what, do, where=path)
    return np.dtype("<u2"), 0, len(raw) // 2
