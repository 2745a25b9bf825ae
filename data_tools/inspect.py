"""Check all of a token data set and report what it holds.

    megazero inspect data/quickstart/train
    megazero inspect data/quickstart/train --tokenizer data/quickstart/tokenizer.model --document 7

Opening it checks the index; then every id is read and checked against the vocabulary (--vocab, or the tokenizer's).
With a tokenizer, the report counts each special token. A document is shown with the names of its special tokens; if the
data set has a loss mask, it is split into stretches that count in the loss and stretches that do not.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository; this folder's inspect.py would hide Python's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from data_tools import run_script

    run_script(__file__)  # does not return

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from data_tools.command import Parser, positive, prefix, run
from megazero.base.answers import answer
from megazero.base.errors import UserError
from megazero.data.joined import open_files
from megazero.data.origin import origin_of
from megazero.data.token_dataset import TokenDataset
from megazero.data.tokenizer import Tokenizer, open_tokenizer

BLOCK = 1 << 22  # tokens read at a time


def inspect(options: argparse.Namespace) -> None:
    """Print the facts of a data set, or the text of one document."""
    tokenizer = open_tokenizer(options.tokenizer) if options.tokenizer else None
    if options.document is not None and tokenizer is None:
        raise UserError(190, "--document needs --tokenizer", "give the tokenizer of the data", where="inspect")
    dataset = open_files(options.prefix)
    origin_of(dataset, tokenizer)
    vocab = options.vocab or (tokenizer.vocab_size if tokenizer else None)
    counts = np.zeros(tokenizer.vocab_size if tokenizer else 0, np.int64)
    found = _scan(dataset, vocab, counts)
    lengths = np.diff(dataset.offsets(0, dataset.num_documents + 1))
    statistics = {"min": np.min, "median": np.median, "mean": np.mean, "max": np.max}
    report = {
        "prefix": str(options.prefix),
        "dtype": str(dataset.dtype),
        "documents": dataset.num_documents,
        "tokens": dataset.num_tokens,
        **{f"length_{name}": of(lengths).item() if len(lengths) else None for name, of in statistics.items()},
        **found,
        "vocab": vocab,
    }
    if tokenizer is not None:
        names = sorted(tokenizer.specials.items(), key=itemgetter(1))
        report["specials"] = {name: {"id": i, "count": int(counts[i])} for name, i in names}
        if options.document is not None:
            report |= _document(dataset, tokenizer, options.document)
    answer(json.dumps(report) if options.json else "\n".join(f"{name:14} {value}" for name, value in _table(report)))


def _table(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines of a human-readable report as (name, text)."""
    for name, value in report.items():
        if name == "specials":
            found = {token: special for token, special in value.items() if special["count"]}
            yield from (("special", f"{t} is {s['id']}, {s['count']:,} times") for t, s in found.items())
            if others := len(value) - len(found):
                yield "special", f"{others:,} others, which do not occur"
        elif name == "scored" and value:
            yield name, f"{value:,} tokens count in the loss, {value / report['tokens']:.2%}"
        elif name == "scored":
            yield name, "every token counts in the loss" if value is None else "no token"
        elif name == "stretches":
            yield from (("scored" if each["scored"] else "not scored", repr(each["text"])) for each in value)
        else:
            yield name, f"{value:,}" if isinstance(value, int | float) else "-" if value is None else str(value)


def _scan(dataset: TokenDataset, vocab: int | None, counts: np.ndarray) -> dict[str, int | None]:
    """Return the smallest and the largest id of the whole file, and how many tokens are trained on (None: all).

    Args:
        counts: the number of occurrences of each id of a tokenizer is added to it.

    Raises:
        UserError: 205, an id outside of [0, vocab).
    """
    lows, highs, scored = [], [], 0
    for start in range(0, dataset.num_tokens, BLOCK):
        stop = min(start + BLOCK, dataset.num_tokens)
        block = dataset.read(start, stop)
        outside = (block < 0) | (block >= (vocab or 2**62))
        if outside.any():
            first = int(np.argmax(outside))
            document, position = dataset.locate(start + first)
            expected = f"0 <= id < {vocab}" if vocab else "0 <= id"
            what = f"token {position:,} of document {document:,} is {block[first]}, expected {expected}"
            raise UserError(205, what, "was it made with another tokenizer?", where=dataset.bin_path)
        lows.append(int(block.min()))
        highs.append(int(block.max()))
        scored += int(dataset.scored(start, stop).sum())
        counts += np.bincount(block[block < len(counts)], minlength=len(counts))
    low, high = min(lows, default=None), max(highs, default=None)
    return {"id_min": low, "id_max": high, "scored": scored if dataset.mask_digest else None}


def _document(dataset: TokenDataset, tokenizer: Tokenizer, document: int) -> dict[str, Any]:
    """Return a document's "text"; with a mask, also its "stretches". Raises UserError 190: no such document."""
    if not 0 <= document < dataset.num_documents:
        what = f"--document {document}: there are documents 0 to {dataset.num_documents - 1:,}"
        raise UserError(190, what, "choose one of those", where="inspect")
    start, stop = dataset.bounds(document)
    ids = dataset.read(start, stop).tolist()
    text = {"text": _with_names(tokenizer, ids)}
    if not dataset.mask_digest:
        return text
    marked = zip(ids, dataset.scored(start, stop).tolist(), strict=True)
    stretches = [(scored, [i for i, _ in stretch]) for scored, stretch in groupby(marked, key=itemgetter(1))]
    return text | {"stretches": [{"text": _with_names(tokenizer, ids), "scored": scored} for scored, ids in stretches]}


def _with_names(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids, with the names of special tokens in it."""
    names = {i: name for name, i in tokenizer.specials.items()}
    runs = groupby(ids, key=lambda i: names.get(i, ""))
    return "".join(name * len([*run]) if name else tokenizer.decode([*run]) for name, run in runs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (command.py)."""
    parser = Parser(prog="megazero inspect", description="Check a token data set and describe its contents.")
    parser.add_argument("prefix", type=prefix, metavar="PREFIX", help="prefix of .bin and .idx; or X.ds, X.npy, X.bin")
    parser.add_argument("--tokenizer", type=Path, metavar="MODEL", help="tokenizer: gives the vocabulary, and decodes")
    parser.add_argument("--vocab", type=positive, help="bound of all ids (default: the tokenizer's)")
    parser.add_argument("--document", type=int, metavar="N", help="print the text of document N, counted from 0")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return run(inspect, parser, argv)
