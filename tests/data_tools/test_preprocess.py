"""Preprocessing as users run it: results, faults, kills, memory."""

import json
import os
import platform
import resource
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from data_tools import preprocess
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.tokenizer import Tokenizer, open_tokenizer
from tests.data.test_tokenizer_kinds import GPT2, write_ranks
from tests.processes import alive, children, until, until_gone
from tests.quiet import without_heartbeat

REPOSITORY = Path(__file__).parent.parent.parent


def texts_of(prefix: Path, tokenizer: Tokenizer) -> list[str]:
    """Documents of a data set, decoded; each ends with the end-of-document id, once."""
    dataset, texts = IndexedDataset(prefix), []
    for document in range(dataset.num_documents):
        *ids, last = dataset.read(*dataset.bounds(document)).tolist()
        assert last == tokenizer.eod and tokenizer.eod not in ids
        texts.append(tokenizer.decode(ids))
    return texts


def test_documents_come_back_and_workers_do_not_matter(command, model: Path, tmp_path: Path):
    """Text larger than a piece, small documents, empty ones; the same bytes from 1 and 2 workers."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text()
    big, odd = source * 8, "\u2581 \r\n\0 é😀" * 3
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.py").write_bytes(big.encode())
    (tmp_path / "in/b.txt").write_bytes(b"")
    lines = [json.dumps({"body": text}) for text in (odd, "", "x", source)]
    (tmp_path / "in/c.jsonl").write_text("\n".join(lines))
    for workers in (1, 2):
        line = ("--input", "in", "--tokenizer", model, "--output", f"out/{workers}", "--key", "body")
        result = command("preprocess", *line, "--workers", workers)
        assert result.returncode == 0 and result.stderr == "", result.stderr
    texts = [big, odd, "x", source]
    assert texts_of(tmp_path / "out/1", open_tokenizer(model)) == texts
    dataset = IndexedDataset(tmp_path / "out/1")
    num_bytes = sum(len(text.encode()) for text in texts)
    assert f"4 documents (2 empty ones skipped), {dataset.num_tokens:,} tokens, {num_bytes:,} bytes" in result.stdout
    assert dataset.dtype == np.uint16
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"out/1{suffix}").read_bytes() == (tmp_path / f"out/2{suffix}").read_bytes()
    assert len(list((tmp_path / "out").iterdir())) == 6


def test_large_vocabularies_need_int32(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def large(path: Path) -> Tokenizer:
        tokenizer = open_tokenizer(path)
        tokenizer.vocab_size = 65_537
        return tokenizer

    monkeypatch.setattr(preprocess, "open_tokenizer", large)
    (tmp_path / "x.txt").write_text("some text")
    arguments = ["--input", tmp_path / "x.txt", "--tokenizer", model, "--output", tmp_path / "x", "--workers", 1]
    assert preprocess.main([str(argument) for argument in arguments]) == 0
    assert IndexedDataset(tmp_path / "x").dtype == np.int32


def test_what_it_refuses(fails, model: Path, tmp_path: Path):
    """Each fault is one line and leaves neither a pair nor a temporary file."""
    (tmp_path / "good.txt").write_text("good text\n" * 50_000)
    (tmp_path / "bad.txt").write_bytes(b"abc\n" * 100_000 + b"\xff")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text" "b"}\n')
    (tmp_path / "key.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "empty.txt").write_text("")
    before = sorted(tmp_path.iterdir())
    line = ("preprocess", "--tokenizer", model, "--output", "out", "--workers", 1, "--input")
    assert "bad.txt: byte 400,000 (0xff)" in fails(1, 212, *line, "good.txt", "bad.txt")
    assert "bad.jsonl:2:" in fails(1, 213, *line, "bad.jsonl")
    assert 'under "text", got keys body' in fails(1, 213, *line, "key.jsonl")
    assert "got 1 empty documents in 1 files" in fails(1, 214, *line, "empty.txt")
    fails(1, 211, *line, "none")
    fails(1, 209, *line[:2], "none.model", *line[3:], "good.txt")
    fails(2, 190, *line[:6], 0, "--input", "good.txt")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_tokenizer_whose_library_panics_is_one_line(command, tmp_path: Path, workers: int):
    """The library's own lines come before it."""
    ranks = write_ranks(tmp_path / "x.tiktoken")
    told = json.loads((tmp_path / "x.tiktoken.json").read_text()) | {"pattern": rf"(?:a|a)*b(?<=x)|{GPT2}"}
    (tmp_path / "x.tiktoken.json").write_text(json.dumps(told))
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("good " * 60_000, "a" * 60 + "b"))
    )
    line = ("--input", "x.jsonl", "--tokenizer", ranks, "--output", "out", "--workers", workers)
    result = command("preprocess", *line)
    ours = [line for line in result.stderr.splitlines() if "MZ-" in line or "Traceback" in line]
    assert result.returncode == 1 and len(ours) == 1, result.stderr
    assert ours[0].startswith(f"MZ-209 {ranks}: its library fails: ") and "BacktrackLimitExceeded" in ours[0]
    assert not list(tmp_path.glob("out.bin"))


@contextmanager
def start(tmp_path: Path, model: Path, text: bytes, limit: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command under way, with two workers and its own process group; a test that fails leaves none of them."""
    (tmp_path / "x.txt").write_bytes(text)
    line = [sys.executable, REPOSITORY / "data_tools/preprocess.py", "--input", "x.txt", "--tokenizer", model]
    with subprocess.Popen(
        [*line, "--output", "out/x", "--workers", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None,
    ) as child:
        try:
            yield child
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise


SENDING = {"x86_64": ("1", "46"), "aarch64": ("64", "211")}.get(platform.machine(), ())  # write, sendmsg
RECEIVING = {"x86_64": ("0", "47"), "aarch64": ("63", "212")}.get(platform.machine(), ())  # read, recvmsg
LONG = b"some words of text, over and over again\n" * 1_000_000  # 40 MB: a dozen seconds of work


def wait_for_tokens(tmp_path: Path) -> None:
    """Until the temporary .bin has grown: all parts are at work."""
    until(lambda: any(path.stat().st_size for path in tmp_path.glob("out/*.unfinished/*.bin.tmp-*")))


def children_of(pid: int) -> list[int]:
    """Its worker processes."""
    return [p for p in children(pid) if b"encoding.py" in command_line(p)]


def command_line(pid: int) -> bytes:
    """The command line of a process; nothing if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_killed_command_leaves_no_data_set_and_no_workers(tmp_path: Path, model: Path):
    with start(tmp_path, model, LONG) as child:
        wait_for_tokens(tmp_path)
        workers = children_of(child.pid)
        assert len(workers) == 2
        child.send_signal(signal.SIGKILL)
    until_gone(workers)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.unfinished"]


@pytest.mark.full  # one that is killed in the middle of a message stays in the quick half
def test_killed_worker_is_one_line(tmp_path: Path, model: Path):
    with start(tmp_path, model, LONG) as child:
        wait_for_tokens(tmp_path)
        workers = children_of(child.pid)
        os.kill(workers[0], signal.SIGKILL)
        stderr = without_heartbeat(child.communicate()[1])
    assert child.returncode == 1 and stderr.startswith("MZ-216: a worker process died"), stderr
    assert stderr.count("\n") == 1 and list((tmp_path / "out").iterdir()) == []
    until_gone(workers)


def test_worker_killed_in_the_middle_of_a_message_is_one_line(tmp_path: Path, model: Path):
    """The command does not read while it is stopped, and what a worker sends is longer than a pipe holds."""
    with start(tmp_path, model, LONG) as child:
        wait_for_tokens(tmp_path)
        workers = children_of(child.pid)
        os.kill(stop_while_one_sends(child, workers), signal.SIGKILL)
        child.send_signal(signal.SIGCONT)
        stderr = without_heartbeat(child.communicate(timeout=300)[1])
    assert child.returncode == 1 and stderr.startswith("MZ-216: a worker process died"), stderr
    until_gone(workers)


def stop_while_one_sends(child: subprocess.Popen[str], workers: list[int]) -> int:
    """Stop the command, and return a worker that is held up in sending to it.

    A command that was stopped before it handed out text leaves all workers waiting for it: then it is stopped again.
    """
    assert SENDING, "which system calls send on this machine?"
    while True:
        child.send_signal(signal.SIGSTOP)
        until(lambda: any(is_in(SENDING, worker) for worker in workers) or all(is_in(RECEIVING, w) for w in workers))
        for worker in workers:
            if is_in(SENDING, worker):
                return worker
        child.send_signal(signal.SIGCONT)
        time.sleep(0.01)


def is_in(calls: tuple[str, ...], process: int) -> bool:
    """Whether its main thread is held up in one of these system calls."""
    return Path(f"/proc/{process}/syscall").read_text().split()[0] in calls


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.full)])
def test_interrupt_is_one_line(tmp_path: Path, model: Path, early: bool):
    """Ctrl-C goes to the whole process group, also while workers are starting."""
    with start(tmp_path, model, LONG) as child:
        if early:
            until((tmp_path / "out").exists)
            until(lambda: children_of(child.pid))
        else:
            wait_for_tokens(tmp_path)
        os.killpg(child.pid, signal.SIGINT)
        stdout, stderr = child.communicate()
    assert child.returncode == 130 and stdout == ""
    assert without_heartbeat(stderr) == "megazero preprocess: interrupted, the same command resumes there\n"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.full  # the writer's own test is in the quick half
def test_refused_write_is_one_line(tmp_path: Path, model: Path):
    """The operating system itself refuses: a limit on the size of the files that the command writes."""
    with start(tmp_path, model, LONG[:4_000_000], limit=500_000) as child:
        stderr = without_heartbeat(child.communicate()[1])
    assert child.returncode == 1 and stderr.startswith(
        "MZ-208 out/x.unfinished/000000.bin: cannot be written: File too large"
    ), stderr
    assert stderr.count("\n") == 1 and list((tmp_path / "out").iterdir()) == []


def peak_memory(tmp_path: Path, model: Path, text: bytes) -> int:
    """Bytes: the largest resident size that the command and its workers reach, added up."""
    with start(tmp_path, model, text) as child:
        peaks: dict[int, int] = {}
        while child.poll() is None:
            for pid in [child.pid, *(children_of(child.pid) if alive(child.pid) else [])]:
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if "VmHWM" in status:
                    peaks[pid] = 1024 * int(status.split("VmHWM:")[1].split()[0])
            time.sleep(0.02)
    assert child.returncode == 0
    return sum(peaks.values())


@pytest.mark.full
def test_memory_does_not_grow_with_the_file(tmp_path: Path, model: Path):
    """One document of 30 MB and one of 3 MB, made of digits: a token per byte, the worst case, and the quickest."""
    line = b"0123456789" * 20 + b"\n"
    small = peak_memory(tmp_path, model, line * 15_000)
    large = peak_memory(tmp_path, model, line * 150_000)
    assert large - small < 10_000_000
    assert IndexedDataset(tmp_path / "out/x").num_tokens == 201 * 150_000 + 1
