"""Preprocessing and tokenizer training beside plain sentencepiece and HuggingFace's tokenizers.

    python scripts/bench/data.py [--megabytes 32] [--vocab 8192] [--processes 1 2] [--launches 3] [--pairs 21] [--json]
                                 [--save]

The text is the sources of Python's standard library, as scripts/quickstart_data.py takes them, and behind them those of
the packages that are installed, the first --megabytes of them: a document for each source file, a document on each line
of a .jsonl file, which is in the page cache. With "N processes" every system may use N cores, and has N processes or
threads that encode.

preprocessing: from that file to token files, with an end-of-document id after each document.
    sentencepiece        one process, whatever N is: it reads a line, encodes its text, writes the ids
    sentencepiece, pool  the same work as Megatron-LM's tools/preprocess_data.py divides it: a pool of N processes that
                         decode and encode lines, and one process that reads and writes
    ours                 data_tools/preprocess.py --workers N, which also checks all text before it begins and flushes
                         what it has written
    tokenizers           the threads of HuggingFace's library, with a byte-level BPE of as many pieces. Its tokens are
                         others, so that only MB/s can be compared
All but the last have the same vocabulary. They must write the same ids, or the script fails.

tokenizer training: from that file to a vocabulary of --vocab pieces.
    sentencepiece        the library's trainer in this process, with the settings and the lines of ours
    ours                 data_tools/train_tokenizer.py: the same trainer, and a check of the
                         vocabulary on the text. It must find the same pieces, or the script fails
    tokenizers           HuggingFace's trainer of a byte-level BPE, which splits the text into words first

The seconds are those of the work: Python has started and has imported what it needs, but worker processes start within
them. MB and tokens in a second follow from the median. In all systems text and ids go between processes through pipes.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from multiprocessing import Pool
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import numpy as np
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from data_tools import preprocess, train_tokenizer
from data_tools.train_tokenizer import SETTINGS, sentences
from megazero.data.indexed_dataset import IndexedDataset, file_pair
from scripts import quickstart_data
from scripts.bench import figures
from scripts.bench.harness import AGAIN, Group, Measured, add_options, chosen, measure, rows_of
from scripts.bench.processes import Call, System

CORPUS, MODEL, EXPECTED, BYTE_LEVEL = "corpus.jsonl", "tokenizer.model", "expected", "tokenizer.json"  # in the folder
PLAIN, POOL, OURS, PEER = "sentencepiece", "sentencepiece, pool", "ours", "tokenizers"
END = "</s>"
CHUNK, BATCH = 32, 256  # lines that a worker of the pool takes at a time, documents that the peer's threads share
MOST_MB = 60  # of more text our trainer takes a sample, and would do less work than the others
SERVE = "import sys; from scripts.bench.data import serve; serve(*sys.argv[1:])"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=32, help="of text, at most (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=8192, help="pieces (default: %(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    add_options(parser)
    options = parser.parse_args()
    if not 0 < options.megabytes <= MOST_MB:
        parser.error(f"--megabytes {options.megabytes}: expected at most {MOST_MB}")
    if not 0 < options.vocab <= 65_536:
        parser.error(f"--vocab {options.vocab}: expected at most 65536, ids of two bytes")
    if max(options.processes) > (cores := len(os.sched_getaffinity(0))):
        parser.error(f"--processes {max(options.processes)}: expected at most {cores}, the cores that are here")
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        make_data(Path(folder), options.megabytes, options.vocab)
        return figures.tell(reports(Path(folder), options), as_json=options.json, save=options.save)


def reports(folder: Path, options: argparse.Namespace) -> Iterator[figures.Report]:
    """Yield a report for each task and each number of processes."""
    text_mb = sum(len(text.encode()) for text in texts_of(folder)) / 1e6

    def work(task: str, system: str) -> dict[str, float]:
        if task == "tokenizer training":
            return {"MB": text_mb}
        tokens = (
            np.load(folder / f"{PEER}.npy").sum() if system == PEER else IndexedDataset(folder / EXPECTED).num_tokens
        )
        return {"MB": text_mb, "tokens": float(tokens)}

    for task in ACTS:
        for processes in options.processes:
            group = group_of(task, folder, options.vocab, processes, options.only)
            measured = measure(group.systems, options.launches, -(-options.pairs // options.launches))
            # What the processes do that the systems have started counts as other processes' time.
            known = replace(measured, foreign=[])
            yield rated(group, known, lambda system, task=task: work(task, system), resident=False)


def group_of(task: str, folder: Path, vocab: int, processes: int, only: list[str]) -> Group:
    absent = {} if importlib.util.find_spec("tokenizers") else {PEER: "not installed"}
    names = [who for who in ACTS[task] if who not in absent]
    told = (str(folder), str(vocab), str(processes))
    systems = [System(who, of_its_own, (task, who, *told), has_loss=False, times_itself=True) for who in names]
    systems.insert(1, replace(systems[0], name=systems[0].name + AGAIN))
    title = f"{task}, {processes} process{'es' * (processes > 1)}"
    return Group(title, chosen(systems, only), absent=absent, again=False)


def rated(
    group: Group, measured: Measured, work: Callable[[str], Mapping[str, float]], *, resident: bool = True
) -> figures.Report:
    """Return the report of a group, with columns of the work that is done in a second, by the median.

    Args:
        work: returns the amounts that a call of a system does, by their units.
        resident: whether the systems' own processes do the work, so that their memory says something.
    """
    rows = rows_of(group, measured)
    for row in rows:
        if row["seconds"] is not None:
            row["columns"] = {f"{unit}/s": amount / row["seconds"] for unit, amount in work(row["system"]).items()}
        if not resident:
            row |= {"peak_mb": None, "built_mb": None}
    rounds = len(measured.launches[0][group.systems[0].name])
    return figures.report_of(
        group.title, rows, launches=len(measured.launches), rounds=rounds, foreign=measured.foreign
    )


def make_data(folder: Path, megabytes: float, vocab: int) -> None:
    """Write the text, the vocabularies of ours and of the peer, and the token files that ours makes."""
    size = 0
    with (folder / CORPUS).open("w") as file:
        for path in chain(quickstart_data._sources(), sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))):
            text = quickstart_data._utf8(path)
            if not text or quickstart_data.is_table(text):
                continue
            if size + len(text.encode()) <= megabytes * 1e6:
                size += len(text.encode())
                file.write(json.dumps({"text": text}) + "\n")
    train_ours(folder, folder / MODEL, vocab)
    preprocess_ours(folder, folder / EXPECTED, 1)
    if importlib.util.find_spec("tokenizers"):
        train_byte_level(folder, folder / BYTE_LEVEL, vocab)


def texts_of(folder: Path) -> Iterator[str]:
    with (folder / CORPUS).open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


def of_its_own(task: str, who: str, *told: str) -> Call:
    """Return a call that lets another process do a task, which may have children; it returns the task's seconds."""
    line = [sys.executable, "-c", SERVE, task, who, *told]
    child = subprocess.Popen(line, cwd=figures.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    orders, answers = child.stdin, child.stdout
    assert orders is not None and answers is not None

    def call() -> float:
        print("do", file=orders, flush=True)
        if not (answer := answers.readline()):
            raise RuntimeError(f"{task} by {who}: its process ended with {child.wait()}; what it printed says why")
        return float(answer)

    return call


def serve(task: str, who: str, folder: str, vocab: str, cores: str) -> None:
    """Do a task for every line of standard input, on so many cores; answer each with the task's seconds."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    act, check = ACTS[task][who](Path(folder), int(vocab), int(cores))
    for _ in sys.stdin:
        began = time.perf_counter()
        act()
        seconds = time.perf_counter() - began
        check()
        print(seconds, flush=True)


Act = tuple[Callable[[], object], Callable[[], None]]  # what is timed, and what refuses a wrong result of it


def plain_preprocessing(folder: Path, vocab: int, cores: int) -> Act:
    model = SentencePieceProcessor(model_file=str(folder / MODEL))

    def act() -> None:
        with (folder / CORPUS).open() as lines:
            write(folder / PLAIN, (ids_of(model, line) for line in lines))

    return act, lambda: require_same_ids(folder, PLAIN)


def pool_preprocessing(folder: Path, vocab: int, cores: int) -> Act:
    def act() -> None:
        with (folder / CORPUS).open() as lines, Pool(cores, Encoder.open, (str(folder / MODEL),)) as pool:
            write(folder / POOL, pool.imap(Encoder.encode, lines, CHUNK))

    return act, lambda: require_same_ids(folder, POOL)


def our_preprocessing(folder: Path, vocab: int, cores: int) -> Act:
    def check() -> None:
        pairs = zip(file_pair(folder / OURS), file_pair(folder / EXPECTED), strict=True)
        require(all(one.read_bytes() == other.read_bytes() for one, other in pairs), OURS, "ids")

    return lambda: preprocess_ours(folder, folder / OURS, cores), check


def byte_level_preprocessing(folder: Path, vocab: int, cores: int) -> Act:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / BYTE_LEVEL))
    end = tokenizer.token_to_id(END)

    def documents() -> Iterator[list[int]]:
        texts = texts_of(folder)
        while batch := list(islice(texts, BATCH)):
            yield from ([*found.ids, end] for found in tokenizer.encode_batch_fast(batch))

    return lambda: write(folder / PEER, documents()), lambda: None


def plain_training(folder: Path, vocab: int, cores: int) -> Act:
    def act() -> None:
        model = io.BytesIO()
        lines = sentences(texts_of(folder))
        SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, vocab_size=vocab, **SETTINGS)
        (folder / "plain.model").write_bytes(model.getvalue())

    return act, lambda: require(pieces(folder / "plain.model") == pieces(folder / MODEL), PLAIN, "pieces")


def our_training(folder: Path, vocab: int, cores: int) -> Act:
    path = folder / "ours.model"
    check = lambda: require(pieces(path) == pieces(folder / MODEL), OURS, "pieces")  # noqa: E731
    return lambda: train_ours(folder, path, vocab), check


def byte_level_training(folder: Path, vocab: int, cores: int) -> Act:
    return lambda: train_byte_level(folder, folder / "again.json", vocab), lambda: None


ACTS: Mapping[str, Mapping[str, Callable[[Path, int, int], Act]]] = {
    "preprocessing": {
        PLAIN: plain_preprocessing,
        POOL: pool_preprocessing,
        OURS: our_preprocessing,
        PEER: byte_level_preprocessing,
    },
    "tokenizer training": {PLAIN: plain_training, OURS: our_training, PEER: byte_level_training},
}


def ids_of(model: SentencePieceProcessor, line: str) -> list[int]:
    """Return the ids of a line's document, with the one that ends it."""
    return [*model.encode(json.loads(line)["text"]), model.eos_id()]


class Encoder:
    """The model of a worker of the pool, which gets no more than a line for each call."""

    model: ClassVar[SentencePieceProcessor]

    @classmethod
    def open(cls, path: str) -> None:
        cls.model = SentencePieceProcessor(model_file=path)

    @classmethod
    def encode(cls, line: str) -> list[int]:
        return ids_of(cls.model, line)


def write(stem: Path, documents: Iterable[list[int]]) -> None:
    """Write documents end to end as ids of two bytes into STEM.bin, and their lengths into STEM.npy."""
    lengths = []
    with open(f"{stem}.bin", "wb") as file:
        for ids in documents:
            file.write(np.array(ids, np.uint16).tobytes())
            lengths.append(len(ids))
    np.save(f"{stem}.npy", np.array(lengths))


def require_same_ids(folder: Path, name: str) -> None:
    """Refuse documents of `write` that differ from those that ours has written."""
    expected = IndexedDataset(folder / EXPECTED)
    lengths = np.array_equal(np.load(folder / f"{name}.npy"), np.diff(expected.offsets(0, expected.num_documents + 1)))
    require(lengths and (folder / f"{name}.bin").read_bytes() == expected.bin_path.read_bytes(), name, "ids")


def require(same: bool, name: str, what: str) -> None:
    if not same:
        raise ValueError(f"{name} made other {what} than ours: they have not done the same work")


def pieces(path: Path) -> list[str]:
    """Return the pieces of a vocabulary, in the order of their ids."""
    model = SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(i) for i in range(model.vocab_size())]


def preprocess_ours(folder: Path, prefix: Path, workers: int) -> None:
    words = ["--input", folder / CORPUS, "--tokenizer", folder / MODEL, "--output", prefix, "--workers", workers]
    _quietly(preprocess.main, words)


def train_ours(folder: Path, model: Path, vocab: int) -> None:
    _quietly(train_tokenizer.main, ["--input", folder / CORPUS, "--output", model, "--vocab", vocab])


def train_byte_level(folder: Path, path: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts_of(folder), trainers.BpeTrainer(vocab_size=vocab, **options))
    tokenizer.save(str(path))


def _quietly(main: Callable[[Sequence[str]], int], words: Sequence[object]) -> None:
    """Run a command of data_tools in this process; raise what it says if it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main([str(word) for word in words])
    if code:
        raise RuntimeError(said.getvalue())


if __name__ == "__main__":
    sys.exit(main())
