"""Commands in processes that start in a moment: forked from one that has imported torch and a run's modules already.

    process = Process(["train.py", "--config", "tiny"])      like subprocess.Popen([sys.executable, "train.py", ...])

One process for each worker of pytest imports everything once, computes nothing, and forks a child for each command.
The child has the environment, the folder, the ignored signals and the pipes that a process started by the test would
have; it runs the command as Python's `__main__`, ends as Python ends, and may be killed like any other. Only what is
imported is there before its time: tests of starting itself use `subprocess` (`tests.tiny_run.fresh_command`).
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megazero.base.answers import leave

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "megazero.tools.training.early_look",
    "megazero.schedules.draw",
    "megazero.config.explain",
)  # beside a run's own
_NUMBER = 8  # bytes of a number in messages


class Process:
    """A command in a forked process, with the part of subprocess.Popen's interface that tests use; pipes of text."""

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ):
        """Start it.

        Args:
            stdin: its standard input is a pipe, not empty.
        """
        self.args = [str(word) for word in arguments]
        self.returncode: int | None = None
        ends = [os.pipe() for _ in range(4)]  # standard input, output, error, and news of it
        (taken, given), (out, stdout), (err, stderr), (self._news, told) = ends
        self.stdin, self.stdout, self.stderr = os.fdopen(given, "w"), os.fdopen(out), os.fdopen(err)
        if not stdin:
            self.stdin.close()
        theirs = (taken, stdout, stderr, told)
        ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
        environment = dict(os.environ if env is None else env)
        request = {"arguments": self.args, "cwd": str(cwd), "environment": environment, "ignored": ignored}
        try:
            _send(_starter(), request, theirs)
        finally:
            for end in theirs:
                os.close(end)
        self.pid = self._number()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal, of a process that has ended; None: it goes on."""
        return self.returncode if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return how."""
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read to the end of both outputs, which is when no process has them any more; then wait."""
        self.stdin.close()
        found = ["", ""]

        def read(number: int, pipe: IO[str]) -> None:
            found[number] = "" if pipe.closed else pipe.read()

        pipes = (self.stdout, self.stderr)
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate(pipes)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(timeout)
        self._close()
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> bool:
        """Wait for the exit code."""
        if self.returncode is None and select.select([self._news], [], [], timeout)[0]:
            self.returncode = self._number()
            os.close(self._news)
        return self.returncode is not None

    def _number(self) -> int:
        """Return the next news: first the number of the process, then its exit code."""
        found = os.read(self._news, _NUMBER)
        assert found, "the process that starts the others has ended"
        return int.from_bytes(found, "big", signed=True)

    def _close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):  # what was written for nobody
                pipe.close()


def run(arguments: Sequence[object], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, as subprocess.run does."""
    with Process(arguments, **options) as process:
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.wait(), out, err)


@functools.cache
def _starter() -> socket.socket:
    """Start the process that forks the others; it ends when this one does."""
    ours, theirs = socket.socketpair()
    line = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}  # as children have
    process = subprocess.Popen(line, cwd=ROOT, pass_fds=[theirs.fileno()], **pipes)
    theirs.close()

    def end() -> None:
        process.kill()
        process.communicate()
        ours.close()

    atexit.register(end)
    return ours


def _send(to: socket.socket, request: object, handles: Sequence[int]) -> None:
    text = json.dumps(request).encode("utf-8", "surrogateescape")
    socket.send_fds(to, [len(text).to_bytes(_NUMBER, "big")], handles)
    to.sendall(text)


def _receive(requests: socket.socket) -> tuple[Any, list[int]] | None:
    """Return a request and its handles; None at the end."""
    length, handles, _, _ = socket.recv_fds(requests, _NUMBER, 4, socket.MSG_WAITALL)
    if not length:
        return None
    text, missing = b"", int.from_bytes(length, "big")
    while len(text) < missing:
        text += requests.recv(missing - len(text))
    return json.loads(text), handles


def serve(requests: socket.socket) -> Callable[[], object]:
    """Fork a process for every request; return, in each of them, what it is to do. In this one at the end: nothing."""
    news, wake = socket.socketpair()
    for end in (news, wake):
        end.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it comes to the tests as well, which end this one
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}  # the handle for news of each child
    while True:
        readable, _, _ = select.select([requests, news], [], [])
        if news in readable:
            news.recv(4096)
            _bury(running)
        if requests not in readable:
            continue
        if (received := _receive(requests)) is None:
            return lambda: None
        request, handles = received
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            for end in (requests, news, wake):
                end.close()
            for handle in running.values():
                os.close(handle)
            return _prepared(handles=handles, **request)
        for handle in handles[:3]:
            os.close(handle)
        running[pid] = handles[3]
        _tell(handles[3], pid)


def _bury(running: dict[int, int]) -> None:
    """Tell of the children that have ended how they did."""
    for pid in list(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            handle = running.pop(pid)
            _tell(handle, os.waitstatus_to_exitcode(status))
            os.close(handle)


def _tell(handle: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # a test that failed waits for nothing
        os.write(handle, number.to_bytes(_NUMBER, "big", signed=True))


def _prepared(
    handles: list[int], arguments: list[str], cwd: str, environment: dict[str, str], ignored: list[int]
) -> Callable[[], object]:
    """Be like a process that the test has started; return what runs the command."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (None, signal.SIG_DFL):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does at its start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for standard, handle in enumerate(handles[:3]):
        os.dup2(handle, standard)
    for handle in handles:
        os.close(handle)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be another
    first, *rest = arguments
    if first == "-c":
        return functools.partial(_run_code, *rest)
    if first == "-m":
        sys.argv, sys.path[0] = rest, cwd
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = arguments, str(Path(first).absolute().parent)
    return lambda: runpy.run_path(first, run_name="__main__")


def _run_code(code: str, *arguments: str) -> None:
    """Do `python -c CODE ARGUMENTS`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    exec(compile(code, "<string>", "exec"), main.__dict__)


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    from megazero.run import session
    from tests.tiny_run import plain_picture  # which imports this module

    session.draw_loss = plain_picture
    gc.collect()
    gc.freeze()  # what is never collected is not copied
    command = serve(requests)
    try:
        command()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _leave(end.code or 0)
    _leave(0)


def _leave(code: int) -> None:
    """End as Python does, but for torch's teardown, which takes a second."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    leave(code)


if __name__ == "__main__":
    main()
