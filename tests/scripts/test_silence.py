"""Nothing of ours is silent for more than two seconds: the script that watches, and every verb under it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.silence import watch
from tests.tiny_run import ROOT, TinyData

LIMIT, FIRST = 2.0, 1.0  # seconds


def silence(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "scripts/silence.py", *(f"--{name}={value}" for name, value in options.items())]
    return subprocess.run([*line, *map(str, command)], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("print('first words'); sys.stdout.flush(); time.sleep(1); print('then')", "after 'first words'"),
        ("print('first words'); sys.stdout.flush(); os.close(1); os.close(2); time.sleep(1)", ""),
        ("time.sleep(1); print('late')", "at the beginning"),
    ],
    ids=["between", "end", "beginning"],
)
def test_a_silence_is_found(code: str, place: str) -> None:
    done = silence(sys.executable, "-c", f"import os, sys, time; {code}", limit=0.5, first=60)
    if place:
        assert done.returncode == 1 and place in done.stderr, done.stderr
    quiet = silence(sys.executable, "-c", f"import os, sys, time; {code}", limit=60, first=60)
    assert quiet.returncode == 0 and quiet.stdout in ("first words\nthen\n", "first words\n", "late\n")


def test_the_first_words_have_a_limit_of_their_own() -> None:
    late = [sys.executable, "-c", "import time; time.sleep(1); print('late')"]
    assert silence(*late, limit=60, first=0.5).returncode == 1
    assert silence(*late, limit=60, first=60).returncode == 0


def test_a_command_that_fails_fails() -> None:
    assert silence(sys.executable, "-c", "import sys; sys.exit(7)").returncode == 7


def test_time_in_the_processor_s_queue_is_not_the_command_s() -> None:
    """Threads that compute all the time, on one processor: each waits half of the time, and says nothing for it."""
    code = "import os, sys, time\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint('begun', flush=True)\n"
    code += "pid = os.fork()\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\n"
    code += "pid and os.waitpid(pid, 0)\n"
    seen = watch([sys.executable, "-c", code], echo=False)
    assert seen.longest.seconds > 1.9 and 0.5 < seen.longest.waited <= seen.longest.seconds + 0.2
    assert seen.longest.own < seen.longest.seconds


def test_a_sleep_that_the_kernel_counts_as_a_wait_is_not_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel was seen to do it: a thread sleeps, and when it wakes, its whole sleep is in the count of waits."""
    counts = iter([0.0, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr("scripts.silence._waits", lambda _: [("1", False, next(counts, 1.0))])
    seen = watch([sys.executable, "-c", "import time; time.sleep(1); print('late')"], echo=False)
    assert seen.first.own > 0.7


@pytest.fixture(scope="module")
def trained(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, and beside it an export of it."""
    folder = tmp_path_factory.mktemp("silence")
    for line in (
        ["train", "--config", tiny_data.config, f"run.dir={folder / 'run'}", "run.steps=2", "model.vocab=512"],
        ["export", "--to", "hf", "--run", folder / "run", "--out", folder / "hf"],
    ):
        subprocess.run([sys.executable, "-m", "megazero", *map(str, line)], cwd=ROOT, check=True, capture_output=True)
    return folder


def check(line: list[object], tmp_path: Path, environment: dict[str, str] | None = None) -> str:
    """Watch a command, which may be silent for no longer than it is allowed to; return its output."""
    prefix = ["env", *(f"{name}={value}" for name, value in environment.items())] if environment else []
    seen = watch([*prefix, sys.executable, *map(str, line)], echo=False, cwd=ROOT)
    text = seen.output.decode()
    print(text)
    assert seen.code == 0, text
    assert seen.first.own <= FIRST, seen.first
    assert seen.longest.own <= LIMIT, seen.longest
    return text


CORPUS = 40  # times the sources of a package: tens of megabytes


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [1, 2])
def test_train_and_resume(tiny_data: TinyData, tmp_path: Path, size: int) -> None:
    """With kernels to compile, steps and a validation of seconds each, a checkpoint of hundreds of megabytes."""
    large = ["model.layers=12", "model.hidden=512", "model.heads=8", "model.seq_len=256", "model.vocab=8192"]
    large += ["batch.global=16", "batch.micro=8", f"parallel.tensor={size}", "checkpoint.every=1", "observe.every=2"]
    line = ["train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", *large]
    said = check([*line, "run.steps=2"], tmp_path, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    built = ["compiling cpu.cpp", *["waiting for another process that compiles"] * (size > 1)]  # which is another rank
    assert any(words in said for words in built) and "step 1/2 " in said
    said = check([*line, "run.steps=3", "checkpoint.resume=auto"], tmp_path)
    assert "going on from" in said


VERBS = {
    "plan": ["plan", "--config", "gpt13b", "--gpus", "64", "--hardware", "h100-80gb"],
    "search": [
        "plan",
        "--config",
        "gpt1t",
        "--gpus",
        "1024",
        "--hardware",
        "a100-80gb",
        "--search",
        "batch.global=1536",
    ],
    "simulate": ["simulate", "--config", "gpt13b", "--gpus", "64"],
    "certify": ["certify", "--max-ranks", "2", "--layouts", "3"],
    "plant": ["certify", "--plant", "--fault", "nothing"],
    "schedule": ["schedule", "--config", "gpt2_124m", "parallel.pipeline=4", "batch.micro=4"],
    "doctor": ["doctor"],
    "explain": ["explain"],
    "generate": ["generate", "--run", "RUN/run", "--prompt", "def ", "--tokens", "300"],
    "export": ["export", "--to", "hf", "--run", "RUN/run", "--out", "OUT"],
    "import": ["import", "--from", "hf", "--model", "RUN/hf", "--out", "OUT"],
}


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb(tiny_data: TinyData, trained: Path, tmp_path: Path, verb: str) -> None:
    words = [word.replace("RUN", str(trained)).replace("OUT", str(tmp_path / "out")) for word in VERBS[verb]]
    if words[0] == "certify":
        words += ["--config", str(tiny_data.config), "model.dropout=0.0"]
    check(["-m", "megazero", *words], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_data_tools(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    sources = [path.read_text() for path in sorted((ROOT / "megazero").rglob("*.py"))]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in sources * CORPUS))
    model = tmp_path / "m.model"
    check(["data_tools/train_tokenizer.py", "--input", corpus, "--output", model, "--vocab", "4000"], tmp_path)
    check(["data_tools/preprocess.py", "--input", corpus, "--tokenizer", model, "--output", tmp_path / "x"], tmp_path)
    check(["data_tools/inspect.py", tmp_path / "x", "--tokenizer", model], tmp_path)
    check(["data_tools/merge.py", tmp_path / "x", tmp_path / "x", "--output", tmp_path / "y"], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_quickstart_s_data(tmp_path: Path) -> None:
    check(["scripts/quickstart_data.py", "--output", tmp_path / "data"], tmp_path)
    shutil.rmtree(tmp_path / "data")
