"""Make the quickstart's data, a tokenizer and token files, from text that every machine has.

    python scripts/quickstart_data.py --output data/quickstart

The text is the source code of the Python standard library, without tests and without files of tables (character sets,
entities, help texts: a model that learns them repeats them). It has about 10 MB of English and code, and needs no
download. Each of three steps is skipped if its result exists and is valid; a step that runs makes the later ones run:

    corpus.jsonl      one source file per line; made again unless recipe.txt names the current recipe
    tokenizer.model   4,096 pieces
    train.bin, .idx   the tokens; configs split validation off by documents
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: import megazero and data_tools from the repository
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from megazero.base.heartbeat import HEART

    HEART.begin(sys.stderr, "quickstart_data.py")  # before the imports, which take a second on a busy machine

import argparse
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence

from data_tools import preprocess, train_tokenizer
from data_tools.command import Parser, run
from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.base.files import write_atomically
from megazero.base.heartbeat import HEART
from megazero.data.indexed_dataset import IndexedDataset, file_pair
from megazero.data.tokenizer import open_tokenizer

VOCAB = 4096
RECIPE = "2: without tables"  # of the corpus; change it with the choice of files
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_ROW = re.compile(r"""[\[({]*(?:0x|-?\d|[bru]?['"]).*[,'")\]}](?:\s*#.*)?""")  # a line that is a row of literals
_MOST_ROWS = 0.5  # largest share of such lines in a file


def quickstart_data(options: argparse.Namespace) -> None:
    """Make the corpus, the tokenizer and the token files, as far as they are missing."""
    names = ("corpus.jsonl", "recipe.txt", "tokenizer.model", "train")
    corpus, recipe, model, prefix = (options.output / name for name in names)
    if not corpus.exists() or not recipe.exists() or recipe.read_text() != RECIPE:
        model.unlink(missing_ok=True)  # later results first: an interruption must not leave new text and old tokens
        file_pair(prefix)[1].unlink(missing_ok=True)
        with doing("reading Python's sources"):
            texts = documents()
        write_atomically(corpus, as_lines(texts))
        write_atomically(recipe, RECIPE.encode())
        _tell(f"{corpus}: {len(texts):,} documents, {sum(len(text.encode()) for text in texts):,} bytes")
    if not _is_tokenizer(model):
        file_pair(prefix)[1].unlink(missing_ok=True)
        _command(train_tokenizer.main, ["--input", corpus, "--output", model, "--vocab", VOCAB])
    if not _is_dataset(prefix):
        _command(preprocess.main, ["--input", corpus, "--tokenizer", model, "--output", prefix])
    dataset = IndexedDataset(prefix)
    ratio = open_tokenizer(model).token_bytes()[dataset.read(0, dataset.num_tokens)].sum() / dataset.num_tokens
    _tell(f"{prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, {ratio:.3f} bytes per token")


def documents() -> list[str]:
    """Return the texts of the corpus, in a fixed order."""
    return [text for path in _sources() if (text := _utf8(path)) and not is_table(text)]


def as_lines(texts: Sequence[str]) -> bytes:
    """Return texts as JSON, one per line."""
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _tell(text: str) -> None:
    with HEART.paused():
        print(text)


def _sources() -> Iterator[Path]:
    """Yield the standard library's modules, in a fixed order."""
    root = sysconfig.get_path("stdlib")
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py"))


def _utf8(path: Path) -> str:
    """Return the text of a source file; "" if it has another encoding or cannot be read."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return ""


def is_table(text: str) -> bool:
    """Return whether most lines of a source are rows of literals."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return sum(_ROW.fullmatch(line) is not None for line in lines) > _MOST_ROWS * len(lines)


def _is_tokenizer(model: Path) -> bool:
    try:
        return open_tokenizer(model).vocab_size == VOCAB
    except UserError:
        return False


def _is_dataset(prefix: Path) -> bool:
    try:
        dataset = IndexedDataset(prefix)
    except UserError:
        return False
    return dataset.num_tokens > 0 and int(dataset.read(0, dataset.num_tokens).max()) < VOCAB


def _command(main: Callable[[Sequence[str]], int], arguments: list[object]) -> None:
    """Run a data tool; exit with its code if it fails."""
    code = main([str(argument) for argument in arguments])
    if code:
        sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; return the exit code (data_tools/command.py)."""
    parser = Parser(prog="quickstart_data.py", description="Make the quickstart's tokenizer and token files.")
    parser.add_argument("--output", type=Path, default=Path("data/quickstart"), help="folder (default: %(default)s)")
    return run(quickstart_data, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
