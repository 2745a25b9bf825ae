"""Join token data sets into one, and copy those of other projects into our format (`foreign.py`).

    megazero merge data/books data/web --output data/all
    megazero merge olmo.npy --tokenizer tokenizer.json --output data/olmo

Documents keep their order and become one sequence each; empty ones are dropped. All inputs must store ids in the same
type and come from the same tokenizer, as far as the files next to them tell (`megazero/data/origin.py`). If any input
has a loss mask, so has the output; every token of an input without a mask counts.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository; this folder's inspect.py would hide Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from data_tools import run_script

    run_script(__file__)  # does not return

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from data_tools.command import Parser, add_output, prefix, run
from data_tools.foreign import is_foreign, open_foreign
from megazero.base.answers import answer
from megazero.base.errors import UserError
from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.data.joined import open_files
from megazero.data.origin import joined, origin_of, path_of
from megazero.data.token_dataset import TokenDataset
from megazero.data.tokenizer import open_tokenizer

BLOCK = 1 << 20  # tokens copied at a time
_SIGNED = {"uint32": np.dtype(np.int32), "uint64": np.dtype(np.int64)}  # the index format lacks these


def merge(options: argparse.Namespace) -> None:
    """Write the documents of several data sets, one after another, as one."""
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    datasets = [open_foreign(path, tokenizer) if is_foreign(path) else open_files(path) for path in options.prefix]
    stored = _SIGNED.get(datasets[0].dtype.name, datasets[0].dtype)
    for dataset in datasets:
        if _SIGNED.get(dataset.dtype.name, dataset.dtype) != stored:
            what = f"stores {dataset.dtype}, but {datasets[0].prefix} stores {datasets[0].dtype}"
            raise UserError(217, what, "preprocess both with the same tokenizer", where=dataset.prefix)
    whole = joined([origin_of(dataset) for dataset in datasets], datasets[0].prefix)
    path_of(options.output).unlink(missing_ok=True)  # it describes the token files to be replaced
    masked = any(dataset.mask_digest for dataset in datasets)
    with IndexedDatasetWriter(options.output, stored, masked=masked) as writer:
        for dataset in datasets:
            copy_documents(dataset, writer)
        if not writer.num_documents:
            raise UserError(214, "expected documents, got none in any input", "check the inputs", where=options.output)
    if whole is not None:
        replace(whole, mask=writer.mask_digest).write(options.output)
    answer(f"{options.output}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens")


def copy_documents(dataset: TokenDataset, writer: IndexedDatasetWriter) -> None:
    """Append the non-empty documents of a data set. Raises UserError 205: an id is too large for the writer's type."""
    largest = np.iinfo(writer.dtype).max
    for block in TokenStream(dataset).blocks("copying the documents"):
        begin, end = int(block.starts[0]), int(block.starts[-1])
        for start in range(begin, end, BLOCK):
            stop = min(start + BLOCK, end)
            tokens = dataset.read(start, stop)
            if tokens.max() > largest:
                what = f"expected ids of at most {largest:,}, which {writer.dtype} holds, got {tokens.max():,}"
                raise UserError(205, what, "was it made with another tokenizer?", where=dataset.bin_path)
            writer.append(tokens, dataset.scored(start, stop))
        for length in np.diff(block.starts).tolist():
            if length:
                writer.end_document(length)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (command.py)."""
    parser = Parser(prog="megazero merge", description="Join token data sets into one.")
    inputs = "prefix of each input's .bin and .idx; or X.ds, X.npy, X.bin"
    parser.add_argument("prefix", nargs="+", type=prefix, metavar="PREFIX", help=inputs)
    only = "of inputs with only ids (X.npy, X.bin): gives their type and the id that ends a document"
    parser.add_argument("--tokenizer", type=Path, metavar="MODEL", help=only)
    add_output(parser)
    return run(merge, parser, argv)
