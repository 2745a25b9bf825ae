"""Every parser, fed with what is almost right: an answer, or one line that says what is wrong; never a traceback.

Each subject is a way into the program for bytes that somebody else made. A case is a good example, damaged: bits
flipped, parts cut out or doubled, values replaced by ones that break parsers (huge numbers, wrong types, control
characters, half characters). 1,000 cases run in `make test`, 10,000 in `make test-all`, the same every time.
"""

import json
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megazero.base.errors import LINE_LIMIT, FaultList, UserError
from megazero.checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from megazero.checkpoint.save import read_part
from megazero.checkpoint.store import Store
from megazero.config.file import load
from megazero.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megazero.data.tokenizer import open_tokenizer
from megazero.run.folder import RunFolder
from megazero.run.lock import RunLock
from megazero.run.resume import owed_row
from megazero.tools.convert.transformers_files import import_run
from megazero.tools.planning.machine_file import machine_of
from tests.tiny_run import TinyData

SECONDS, MEGABYTES = 2.0, 200.0
FEW, MANY = 1_000, 10_000  # cases over all subjects

VALUES: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, -0.0, 1e308, 1e-308, 0.5]
VALUES += ["", "0", "x" * 5000, "\x1b[31mred\x07", "a\nb", "\u202egnp", "../../etc/passwd", "\ud800", "nan", "%s%n"]
VALUES += [[], {}, [[]], [None], {"": None}, {"step": {}}, [0] * 100, {str(i): i for i in range(50)}]
RAW = [b"", b"\0", b"\xff\xfe", b"NaN", b"Infinity", b"9" * 5000, b"[" * 3000, b"{" * 3000, b'"', b"\x1b]0;x\x07"]
RAW += [
    b"*a",
    b"&a [*a, *a]",
    b"<<: *a",
    b"!!python/object:os.system x",
    b"1e999",
    b"-",
    b"2001-13-45",
    b"\xed\xa0\x80",
]


def mangled(good: bytes, draw: random.Random) -> bytes:
    """The bytes with a few of them changed, cut out, doubled, or replaced by what breaks parsers."""
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((1, 1, 4, 16, len(data))))
        kind = draw.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:at] = data[at:end]
        elif kind == 3:
            data[at:end] = draw.choice(RAW)
        elif kind == 4:
            data[at:end] = draw.randbytes(end - at)
        else:
            del data[at:]
    return bytes(data)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a JSON tree."""
    yield path
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from places(value, (*path, key))


def replaced(good: Any, draw: random.Random) -> Any:
    """The tree with a value, or a key, replaced or taken away."""
    tree = json.loads(json.dumps(good))
    path = draw.choice(list(places(tree)))
    if not path:
        return draw.choice(VALUES)
    *above, last = path
    inner = tree
    for key in above:
        inner = inner[key]
    if draw.random() < 0.2:
        del inner[last]
    else:
        inner[last] = draw.choice(VALUES)
    return tree


def json_case(good: Any, draw: random.Random) -> bytes:
    """A tree with one value replaced, or its text mangled."""
    if draw.random() < 0.7:
        return json.dumps(replaced(good, draw)).encode()
    return mangled(json.dumps(good).encode(), draw)


class Subject:
    """One parser: a good example, a way to damage it, and what reads it."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()

    def case(self, draw: random.Random) -> Callable[[], object]:
        """Puts a damaged example down, and gives what reads it."""
        raise NotImplementedError


class Config(Subject):
    GOOD = (Path(__file__).parents[1] / "configs/tiny.yaml").read_bytes()

    def case(self, draw: random.Random) -> Callable[[], object]:
        path = self.folder / "config.yaml"
        path.write_bytes(mangled(self.GOOD, draw))
        return lambda: load(str(path))


class Override(Subject):
    KEYS = ("model.layers", "zero.stage", "optimizer.betas", "run.dir", "data.valid", "model", "", "a.b.c.d", "run.")

    def case(self, draw: random.Random) -> Callable[[], object]:
        value = draw.choice([*map(str, VALUES), *(raw.decode(errors="surrogateescape") for raw in RAW)])
        text = f"{draw.choice(self.KEYS)}{draw.choice(('=', '==', ''))}{value}"
        return lambda: load("tiny", [text])


class MachineFile(Subject):
    GOOD: dict[str, Any] = {  # noqa: RUF012 - never written to
        "name": "here",
        "memory_bytes": 8 << 30,
        "peak_flops": {"bf16": 9.89e14},
        "memory_bandwidth": 3.35e12,
        "devices_per_node": 8,
        "in_node": {"bandwidth": 4.5e11, "latency": 3e-6},
        "cross_node": {"bandwidth": 5e10, "latency": 1e-5},
        "host_link_bandwidth": 5e10,
        "host_memory_bytes": 250 << 30,
        "reached": {"matmul": 0.6},
    }

    def case(self, draw: random.Random) -> Callable[[], object]:
        path = self.folder / "machine.yaml"
        path.write_bytes(json_case(self.GOOD, draw))  # JSON is YAML
        return lambda: machine_of(str(path))


class Metrics(Subject):
    GOOD = b"".join(json.dumps({"step": i, "loss": i / 3, "mfu": None}).encode() + b"\n" for i in range(1, 9))

    def case(self, draw: random.Random) -> Callable[[], object]:
        path = self.folder / "metrics.jsonl"
        line = json_case({"step": 4, "loss": 1.5, "seconds": {"data": 0.1}}, draw) + b"\n"
        path.write_bytes(mangled(self.GOOD, draw) if draw.random() < 0.5 else self.GOOD[:99] + line + self.GOOD[99:])
        return lambda: owed_row(path, None, own=True, validates=False)


class Lock(Subject):
    GOOD = json.loads(RunLock(Path("lock"))._content)

    def case(self, draw: random.Random) -> Callable[[], object]:
        path = self.folder / "lock"
        path.write_bytes(json_case(self.GOOD, draw))
        lock = RunLock(path)
        return lambda: (lock.take(), lock.release())


class Manifests(Subject):
    def __init__(self, folder: Path, finished: RunFolder):
        super().__init__(folder)
        source = Store(finished.checkpoints).path(4)
        self.good = json.loads((source / FILE_NAME).read_bytes())
        self.step = folder / source.name
        self.step.mkdir()

    def case(self, draw: random.Random) -> Callable[[], object]:
        """Half of them with the right digest: made by somebody who knows how."""
        raw = json_case(self.good, draw)
        if draw.random() < 0.7:
            try:
                raw = Manifest.model_construct(**json.loads(raw)).to_bytes()
            except Exception:  # nothing that could have a digest
                raw = json_case(self.good, draw)
        (self.step / FILE_NAME).write_bytes(raw)
        return lambda: read_manifest(self.step)


class Part(Subject):
    GOOD: dict[str, Any] = {  # noqa: RUF012 - never written to
        "shard": {"name": "shard_00000.safetensors", "size": 100, "blocks": ["0" * 16]},
        "tensors": {"a": [[0, 0, 4, 100, 116, 132]]},
    }

    def case(self, draw: random.Random) -> Callable[[], object]:
        path = self.folder / "part_00000.json"
        path.write_bytes(json_case(self.GOOD, draw))

        def read() -> None:
            try:
                read_part(path)
            except OSError as error:  # its caller makes a UserError of it
                raise UserError(403, str(error), "mend that") from None

        return read


class Index(Subject):
    def __init__(self, folder: Path):
        super().__init__(folder)
        with IndexedDatasetWriter(folder / "good", np.uint16) as writer:
            for length in (3, 1, 7):
                writer.append(np.arange(length))
                writer.end_document()
        self.good = (folder / "good.idx").read_bytes()
        self.bin = (folder / "good.bin").read_bytes()

    def case(self, draw: random.Random) -> Callable[[], object]:
        data = bytearray(mangled(self.good, draw) if draw.random() < 0.5 else self.good)
        if len(data) > 40 and draw.random() < 0.5:
            struct.pack_into("<q", data, draw.randrange(len(data) - 8), draw.choice((-1, 2**62, 2**40, 0)))
        (self.folder / "set.idx").write_bytes(data)
        (self.folder / "set.bin").write_bytes(self.bin if draw.random() < 0.8 else mangled(self.bin, draw))
        return lambda: IndexedDataset(self.folder / "set").read(0, 1)


class TokenizerFile(Subject):
    def __init__(self, folder: Path, good: Path):
        super().__init__(folder)
        self.good = good.read_bytes()

    def case(self, draw: random.Random) -> Callable[[], object]:
        path = self.folder / "tokenizer.model"
        path.write_bytes(mangled(self.good, draw))
        return lambda: open_tokenizer(path).token_bytes()


class Import(Subject):
    MODEL: dict[str, Any] = {  # noqa: RUF012 - never written to
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 16,
        "n_positions": 8,
        "n_inner": None,
        "resid_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "rope_scaling": None,
    }

    def __init__(self, folder: Path):
        super().__init__(folder)
        block = {"ln_1": (8,), "ln_2": (8,), "attn.c_proj": (8, 8), "mlp.c_proj": (32, 8)}
        block |= {"attn.c_attn": (8, 24), "mlp.c_fc": (8, 32)}
        tensors = {"wte.weight": torch.ones(16, 8), "wpe.weight": torch.ones(8, 8)}
        tensors |= {f"ln_f.{part}": torch.ones(8) for part in ("weight", "bias")}
        for name, shape in block.items():
            tensors |= {f"h.0.{name}.weight": torch.ones(shape), f"h.0.{name}.bias": torch.ones(shape[-1])}
        save_file(tensors, folder / "model.safetensors")
        self.weights = (folder / "model.safetensors").read_bytes()
        self.index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}

    def case(self, draw: random.Random) -> Callable[[], object]:
        which = draw.randrange(3)
        index = self.folder / "model.safetensors.index.json"
        index.unlink(missing_ok=True)
        (self.folder / "config.json").write_bytes(
            json_case(self.MODEL, draw) if which == 0 else json.dumps(self.MODEL).encode()
        )
        (self.folder / "model.safetensors").write_bytes(mangled(self.weights, draw) if which == 1 else self.weights)
        if which == 2:
            index.write_bytes(json_case(self.index, draw))
        out = self.folder / f"out{draw.getrandbits(60)}"
        shutil.rmtree(out, ignore_errors=True)  # two cases may have one seed

        def read() -> None:
            try:
                import_run(self.folder, RunFolder(out), lambda text: None, proven=False)
            except UserError:
                assert not out.exists(), "a failed import leaves nothing behind"
                assert not list(self.folder.glob("out*.tmp-*"))
                raise

        return read


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory, tiny_data: TinyData, finished: RunFolder) -> list[Subject]:
    base = tmp_path_factory.mktemp("fuzz")
    plain = (Config, Override, MachineFile, Metrics, Lock, Part, Index, Import)
    found: list[Subject] = [kind(base / kind.__name__) for kind in plain]
    found += [Manifests(base / "manifests", finished), TokenizerFile(base / "tokenizer", tiny_data.tokenizer)]
    torch.cat([torch.ones(1, device="meta")] * 2)  # the first one imports for a second, which is no case's time
    return found


def examine(read: Callable[[], object]) -> str | None:
    """What is wrong with how a case was taken; None: nothing."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        read()
    except UserError as error:
        lines = str(error).split("\n")
        if error.exit_code not in (1, 2):
            return f"exit code {error.exit_code}"
        if len(lines) > 1 and not isinstance(error, FaultList):
            return f"{len(lines)} lines"
        if odd := [line for line in lines if len(line) > LINE_LIMIT or not line.isprintable() or not line]:
            return f"no line to show: {odd[0]!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    seconds = time.process_time() - began  # of this process: the machine may be busy with others
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if seconds > SECONDS:
        return f"took {seconds:.1f} s"
    return f"took {grown:.0f} MB" if grown > MEGABYTES else None


def fuzz(subjects: list[Subject], cases: int) -> None:
    """The same cases every time; each of them a subject and the seed of its damage."""

    @settings(max_examples=cases, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, len(subjects) - 1), st.integers(0, 2**64 - 1))
    def examined(number: int, seed: int) -> None:
        fault = examine(subjects[number].case(random.Random(seed)))
        assert fault is None, f"{type(subjects[number]).__name__}: {fault}"

    examined()


def test_whatever_comes_is_an_answer_or_one_line(subjects: list[Subject]) -> None:
    fuzz(subjects, FEW)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_ten_times_as_much(subjects: list[Subject]) -> None:
    fuzz(subjects, MANY)
