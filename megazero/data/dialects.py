"""Open token files of any kind: the end of the path says which.

    X              X.bin with X.idx, Megatron's and ours        indexed_dataset.py
    X.ds           datatrove's, for nanotron                    datatrove.py
    X.npy          OLMo-core's and Dolma's raw ids, or numpy's  headerless.py
    X.bin          without X.idx: nanoGPT's, or llm.c's         headerless.py

What follows X as a kind is never guessed from content alone: X.bin beside an X.idx is refused, because half of a pair
would be read.
"""

from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.reading import looked_up
from megazero.data.data_file import Descriptors
from megazero.data.datatrove import open_datatrove, refuse_missing_datatrove
from megazero.data.headerless import open_headerless
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.indexed_dataset import refuse_missing as refuse_missing_pair
from megazero.data.token_dataset import GetTokenIds, TokenDataset, TokenIds


def no_tokenizer() -> TokenIds | None:
    """Return that there is none."""
    return None


def open_dataset(
    path: str | Path, ids: GetTokenIds = no_tokenizer, descriptors: Descriptors | None = None
) -> TokenDataset:
    """Open token files.

    Args:
        path: as a config names them.
        ids: what the tokenizer says, asked where the files do not.
        descriptors: shared with other files; None: they have their own.

    Raises:
        UserError: 201 to 204, 225: they are missing or damaged; 222, nothing says which id ends a document; 223, they
            are of another tokenizer.
    """
    found = Path(path)
    refuse_missing(found)
    if found.suffix == ".ds" and not _pair_is_there(found):
        return open_datatrove(found, descriptors)
    if not is_headerless(found):
        return IndexedDataset(found, descriptors)
    known = ids()
    refuse_unknown(found, known is not None)
    assert known is not None
    return open_headerless(found, known, descriptors)


def is_headerless(path: Path) -> bool:
    """Return whether a path names a file of ids alone. Where X.bin is missing, that is taken for a slip: X is meant."""
    return not _pair_is_there(path) and (path.suffix == ".npy" or (path.suffix == ".bin" and path.exists()))


def refuse_missing(path: str | Path) -> None:
    """Refuse token files of which one is missing, or a path that names half a pair. Raises UserError 201."""
    found = Path(path)
    if found.suffix == ".ds" and not _pair_is_there(found):
        refuse_missing_datatrove(found)
    elif not is_headerless(found):
        refuse_missing_pair(found)
    elif found.suffix == ".bin" and found.with_suffix(".idx").exists():
        what = f"is half of a pair: {found.with_suffix('.idx').name} is beside it"
        raise UserError(201, what, f"give the prefix {found.with_suffix('')}", where=found)
    elif not found.exists():
        raise UserError(201, f"no such token file{looked_up(found)}", "give the path of a file of ids", where=found)


def refuse_unknown(path: str | Path, tokenizer: bool) -> None:
    """Refuse a file of ids alone without a tokenizer. Raises UserError 222."""
    if not tokenizer and is_headerless(Path(path)):
        what = f"nothing says which id ends a document: a {Path(path).suffix} file has ids alone"
        raise UserError(222, what, "give the tokenizer that it was made with (data.tokenizer, --tokenizer)", where=path)


def _pair_is_there(path: Path) -> bool:
    return Path(f"{path}.idx").exists()
