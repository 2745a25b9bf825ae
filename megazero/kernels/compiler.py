"""A compiler process that ends together with the process that waits for its result, however that ends.

A compiler is a driver that starts others, and takes up to a minute. So it runs in a group of processes of its own,
under a guard: a small Python process that holds the other end of a pipe. When the pipe closes, because of a signal that
was raised here as an exception or because this process was killed, the guard ends the group and removes the file that
was not finished. Nothing of that asks anything of whoever waits here, which may be in a library at the time.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_LEAVE = 0.3  # seconds that a compiler has to remove its own temporary files
_LOOK = 0.05


def compile_with(command: Sequence[str], output: Path) -> tuple[int, str]:
    """Run a compiler; return its exit code and what it said.

    Args:
        output: that the command writes; removed if this ends otherwise than by returning.

    Raises:
        OSError: no process can be started.
    """
    line = [sys.executable, "-I", "-S", __file__, str(output), *command]
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    # In a session of its own: Ctrl-C at a terminal reaches who waits here, and through the pipe the guard.
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=out, start_new_session=True) as guard:
        assert guard.stdin is not None and guard.stdout is not None
        try:
            said = guard.stdout.read()
        finally:
            guard.stdin.close()
        return guard.wait(), said.decode(errors="replace")


def _guard(output: str, command: Sequence[str]) -> int:
    """Run the command until it ends or the pipe on standard input does; return the exit code."""
    import select

    try:
        compiler = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        print(f"error: {command[0]} cannot be run: {error.strerror}")
        return 127
    while compiler.poll() is None:
        if select.select([0], [], [], _LOOK)[0] and not os.read(0, 1):
            _end(compiler)
            Path(output).unlink(missing_ok=True)
            return 1
    return compiler.returncode


def _end(compiler: "subprocess.Popen[bytes]") -> None:
    """End the compiler and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(compiler.pid, number)
            compiler.wait(_LEAVE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1], sys.argv[2:]))
