"""Time the loader: tokens a second of one rank beside what an H100 trains by plan, and its memory over many steps.

    python scripts/bench/loader.py [--sources 1 10 100] [--steps 100000] [--json] [--save]

A step is 8 sequences of 2,048 tokens, of a model of 1.3 billion parameters: 24 layers of 2,048 elements. Nothing is
done with them, so the time of a step is that of reading it: by the background thread, handed over to the main one. The
sources have equal weights and documents of 1,000 tokens; each has 2 million, which is in the page cache.

Columns: milliseconds of a step, tokens per second, these over the tokens per second of one H100 as `plan` says it for
this step, and the process's resident megabytes after a hundredth of the steps and at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import numpy as np

from megazero.data.documents import TokenStream
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.loader import BatchLoader
from megazero.data.mixture import Mixture, Source, seed_of
from megazero.data.windows import WindowDataset
from scripts.bench import figures

SEQUENCES, SEQ_LEN, VOCAB = 8, 2048, 50_304
DOCUMENTS, DOCUMENT = 2_000, 1_000  # of each source, and tokens of each
SHAPE = {"model.layers": 24, "model.hidden": 2048, "model.heads": 16, "model.vocab": VOCAB, "model.seq_len": SEQ_LEN}
STEP = {"batch.micro": SEQUENCES, "batch.global": SEQUENCES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--steps", type=int, default=100_000, help="of each number of sources (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--save", action="store_true", help="keep what is measured in docs/figures, for its table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as folder:
        return figures.tell(reports(options, Path(folder)), as_json=options.json, save=options.save)


def reports(options: argparse.Namespace, folder: Path) -> Iterator[figures.Report]:
    """Yield the one report, with a row for each number of sources."""
    planned, rows = planned_rate(), []
    for number in options.sources:
        mixture = Mixture([source(folder, k) for k in range(number)])
        rows.append(
            {"system": f"{number} source{'s' * (number > 1)}", "columns": timed(mixture, options.steps, planned)}
        )
    yield figures.report_of(f"the loader, {options.steps:,} steps", rows, launches=1)


def source(folder: Path, number: int) -> Source:
    """Return a source of tokens that count up, whose files are made where they are not there yet."""
    prefix = folder / f"source_{number}"
    if not prefix.with_suffix(".idx").exists():
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for document in range(DOCUMENTS):
                writer.append((np.arange(DOCUMENT) + document * DOCUMENT) % VOCAB)
                writer.end_document()
    stream = TokenStream(IndexedDataset(prefix))
    return Source(prefix.name, WindowDataset(stream, SEQ_LEN, VOCAB, mask_eod=False), 1, seed_of(1, prefix.name))


def timed(mixture: Mixture, steps: int, planned: float) -> dict[str, float]:
    """Return the row of a mixture.

    Args:
        planned: tokens per second that a device trains.
    """
    early = 0.0
    loader = BatchLoader(mixture, global_batch=SEQUENCES, micro_batch=SEQUENCES)
    began = time.perf_counter()
    for step in range(steps):
        loader.step(step)
        if step == steps // 100:
            early = resident()
    seconds = time.perf_counter() - began
    loader.close()
    rate = steps * SEQUENCES * SEQ_LEN / seconds
    return {"ms": 1e3 * seconds / steps, "tokens/s": rate, "of an H100's": rate / planned} | {
        "MB after 1 %": early,
        "MB at the end": resident(),
    }


def resident() -> float:
    """Return the megabytes (1e6) that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def planned_rate() -> float:
    """Return the tokens per second of one H100, as `plan` says."""
    words = [f"{key}={value}" for key, value in (SHAPE | STEP).items()]
    line = ["-m", "megazero", "plan", "--config", "gpt2_1.5b", "--gpus", "1", "--hardware", "h100-80gb", "--json"]
    said = subprocess.check_output([sys.executable, *line, *words], cwd=figures.ROOT, text=True)
    return json.loads(said)["time"]["tokens_per_second_per_device"]


if __name__ == "__main__":
    sys.exit(main())
