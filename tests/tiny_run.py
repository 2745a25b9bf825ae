"""A tiny GPT (56,800 parameters) on tiny data: trained in this process, or by the command line in another."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megazero.base.files import replace_file
from megazero.builders.assemble import bucket_of
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.store import Store
from megazero.checkpoint.weights import read_weights
from megazero.comm.context import CommContext
from megazero.comm.grid import single
from megazero.config.file import load
from megazero.config.schema import Config
from megazero.config.stages import Course
from megazero.data.indexed_dataset import IndexedDataset
from megazero.evaluation.during import evaluations
from megazero.extensions.homes import HOMES
from megazero.launcher.signals import Signals
from megazero.launcher.world import World
from megazero.observe.jsonl import read_rows
from megazero.observe.metrics import TIMING_KEYS
from megazero.run.build import build_trainer
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from megazero.run.resume import Start
from megazero.run.run import Run
from megazero.tools.training.plans import planner
from megazero.train.trainer import Trainer
from tests import warm
from tests.quiet import without_heartbeat

ROOT = Path(__file__).parents[1]
VOCAB = 400
PARAMETERS = 56_800  # 12 L h^2 + 13 L h + (V + s) h + 2 h
CONFIG = f"""
run: {{steps: 4}}
model: {{layers: 2, hidden: 40, heads: 4, vocab: {VOCAB}, seq_len: 32, loss_chunk: 0}}
optimizer: {{lr: 2e-3}}
schedule: {{warmup: 2, min_lr: 2e-4}}
batch: {{global: 4, micro: 2}}
observe: {{every: 1}}
"""


PIXEL = bytes.fromhex(  # a PNG
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c636000000002000148afa4710000000049454e44ae426082"
)


@dataclass(frozen=True)
class TinyData:
    """Paths: a config, and the tokenizer and token files that it names."""

    config: Path
    tokenizer: Path
    train: Path

    def load(self, run_dir: Path, *overrides: str) -> Config:
        return load(str(self.config), [f"run.dir={run_dir}", *overrides])


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: its rows, its folder, its trainer with the engine's final state."""

    rows: list[dict[str, Any]]
    folder: RunFolder
    trainer: Trainer

    def column(self, key: str) -> list[Any]:
        return [row[key] for row in self.rows]

    def weights(self) -> dict[str, Tensor]:
        return dict(self.trainer.engine.named_parameters())


def built(config: Config) -> tuple[Trainer, RunFolder]:
    """The trainer of a config and its made folder. Whoever asks closes the trainer."""
    assert config.run.dir is not None
    folder = RunFolder(config.run.dir)
    lock = RunLock(folder.lock)
    folder.create(lock, resume=False)
    comm = CommContext(bucket=bucket_of(config))
    run = Run(
        config, single(comm), torch.device("cpu"), folder, lock, Signals(), planner(World(0, 1, 0)), HOMES, evaluations
    )
    start = Start(lock.word, lock.word, str(folder.checkpoints))
    return build_trainer(run, start, Course(config).parts[0]).trainer, folder


def all_tokens(prefix: Path) -> np.ndarray:
    """Every token of a data set."""
    dataset = IndexedDataset(prefix)
    return dataset.read(0, dataset.num_tokens)


def saved_weights(folder: RunFolder) -> dict[str, Tensor]:
    """Of a run's newest checkpoint, whole."""
    store = Store(folder.checkpoints)
    manifest = read_manifest(store.path(store.steps()[0]))
    return read_weights(store.path(manifest.step), manifest, manifest.tensors)


def saved_bytes(folder: RunFolder) -> bytes:
    """Every byte of a run's newest checkpoint but the manifest's."""
    newest = Store(folder.checkpoints).path(Store(folder.checkpoints).steps()[0])
    return b"".join(path.read_bytes() for path in sorted(newest.glob("shard_*")))


def repeating(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a row must be the same, bit for bit, when the same steps are trained again."""
    return {key: value for key, value in row.items() if key not in TIMING_KEYS}


def plain_picture(_: Iterable[Mapping[str, Any]], path: Path) -> None:
    """A picture of nothing instead of the loss curve, which takes as long to draw as a tiny run to train."""
    replace_file(path, PIXEL)


def train(config: Config) -> Outcome:
    """Trains in this process, up to the last row and the weights; draws nothing."""
    trainer, folder = built(config)
    try:
        trainer.run()
    finally:
        trainer.close()
    return Outcome(read_rows(folder.metrics), folder, trainer)


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python arguments ...` from the repository's root, in a process that has torch already; without heartbeat."""
    return _quiet(warm.run(arguments, env=os.environ | environment))


def fresh_command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python arguments ...` from the repository's root, as a user starts it; without the heartbeat's lines."""
    line = [sys.executable, *map(str, arguments)]
    return _quiet(subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment))


def _quiet(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    done.stdout, done.stderr = without_heartbeat(done.stdout), without_heartbeat(done.stderr)
    return done
