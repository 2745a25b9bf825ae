"""Run a command and say how long it was silent: nothing of ours may be for more than two seconds.

    python scripts/silence.py python -m megazero simulate --config gpt13b.yaml --gpus 64
    longest silence 1.1 s (1.3 s on the clock) after 'simulating step 1 of 2'; first output after 0.7 s; 12.4 s in all

Both streams of the command go through one pipe and out again. A silence is the time between two pieces of output, or
before the first, or behind the last. Exit code: the command's own where that is not 0; 1 where a silence was longer
than --limit, or the first output came later than --first.

What a program can promise is what it does when it is given a processor. On a busy machine it waits for one: of each
silence, the time is left out that a thread of the command, the one that waited longest in it, has stood in the
kernel's queue of threads that could run (/proc/PID/task/TID/schedstat). On a quiet machine that is nothing, so nothing
is forgiven there. Where the kernel does not tell, the clock alone counts.
"""

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_LOOK = 0.1  # seconds between looks at the command's threads
_LAST_WORDS = 60  # characters of the output before a silence that are shown


@dataclass(frozen=True)
class Silence:
    """One silence of a command.

    Attributes:
        seconds: its length on the clock.
        waited: seconds that a thread of the command waited for a processor in the meantime.
        after: the last output before it.
    """

    seconds: float
    waited: float
    after: str

    @property
    def own(self) -> float:
        """Return the seconds that are the command's."""
        return max(0.0, self.seconds - self.waited)


@dataclass
class WatchedCommand:
    """The output and silences of a command.

    Attributes:
        code: its exit code.
        first: the silence before the first output.
        longest: the longest of all.
        seconds: those of the whole.
        output: its text.
    """

    code: int
    first: Silence
    longest: Silence
    seconds: float
    output: bytes


@dataclass
class _Thread:
    """One thread's waiting: what the kernel has counted, what of it can be, and since when it may wait."""

    counted: float
    waiting_since: float
    waited: float = 0.0


@dataclass
class _Queue:
    """The seconds that the threads of a family of processes have waited for a processor, since `begin`.

    A thread that sleeps does not wait, but some kernels count a sleep as a wait where the thread was moved to another
    processor while it fell asleep (seen on 6.18). So what is added between two looks is never more than the time since
    the thread was last seen asleep, or had last come out of the queue.
    """

    root: int
    looked: float = field(default_factory=time.monotonic)
    threads: dict[tuple[int, str], _Thread] = field(default_factory=dict)

    def look(self) -> None:
        now = time.monotonic()
        for pid in _family(self.root):
            for thread, runs, counted in _waits(pid):
                seen = self.threads.setdefault((pid, thread), _Thread(0.0, self.looked))
                seen.waited += min(counted - seen.counted, now - seen.waiting_since)
                if counted > seen.counted or not runs:
                    seen.waiting_since = now
                seen.counted = counted
        self.looked = now

    def begin(self) -> None:
        for thread in self.threads.values():
            thread.waited = 0.0

    @property
    def longest(self) -> float:
        return max((thread.waited for thread in self.threads.values()), default=0.0)


def watch(command: Sequence[str], *, echo: bool = True, cwd: Path | None = None) -> WatchedCommand:
    """Run a command to its end; return its output and silences.

    Args:
        echo: pass its output on.
    """
    began = last = time.monotonic()
    silences: list[Silence] = []
    output = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd) as process:
        assert process.stdout is not None
        pipe, queue = process.stdout.fileno(), _Queue(process.pid)
        queue.look()
        try:
            while True:
                ready = select.select([pipe], [], [], _LOOK)[0]
                queue.look()
                if not ready:
                    continue
                data, now = os.read(pipe, 1 << 16), time.monotonic()
                silences.append(Silence(now - last, queue.longest, _end_of(output)))
                queue.begin()
                last = now
                if not data:
                    break
                output += data
                if echo:
                    sys.stdout.buffer.write(data)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
    longest = max(silences, key=lambda silence: silence.own)
    return WatchedCommand(process.returncode, silences[0], longest, time.monotonic() - began, output)


def _end_of(output: bytes) -> str:
    """Return the last words of some output."""
    lines = output[-1000:].decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[-_LAST_WORDS:] for line in reversed(lines) if line.strip()), "")


def _family(root: int) -> Iterator[int]:
    """Yield a process and those that it has started, and so on."""
    yield root
    for path in _of_threads(root, "children"):
        for child in _read(path).split():
            yield from _family(int(child))


def _waits(pid: int) -> Iterator[tuple[str, bool, float]]:
    """Yield (thread, whether it runs or could, seconds in the queue for a processor), where the kernel says so."""
    for path in _of_threads(pid, "schedstat"):
        words, stat = _read(path).split(), _read(path.with_name("stat"))
        if len(words) == 3:
            yield path.parent.name, stat.rpartition(")")[2].split()[:1] == ["R"], int(words[1]) * 1e-9


def _of_threads(pid: int, name: str) -> list[Path]:
    """Return a file of each thread of a process; none of one that has ended."""
    try:
        return list(Path(f"/proc/{pid}/task").glob(f"*/{name}"))
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def main() -> int:
    """Read the command line, run, and say what was seen; return the exit code."""
    parser = argparse.ArgumentParser(description="Runs a command and says how long it was silent.")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds (default: %(default)s)")
    parser.add_argument("--first", type=float, default=1.0, help="seconds before the first output (default: 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    options = parser.parse_args()
    if not options.command:
        parser.error("which command?")
    seen = watch(options.command)
    print(report(seen), file=sys.stderr)
    if seen.code:
        return seen.code if seen.code > 0 else 128 - seen.code
    return int(seen.longest.own > options.limit or seen.first.own > options.first)


def report(seen: WatchedCommand) -> str:
    """Return one line about what was seen."""
    longest, first = seen.longest, seen.first
    after = f"after {longest.after!r}" if longest.after else "at the beginning"
    return (
        f"longest silence {longest.own:.1f} s ({longest.seconds:.1f} s on the clock) {after}; "
        f"first output after {first.own:.1f} s ({first.seconds:.1f} s on the clock); {seen.seconds:.1f} s in all"
    )


if __name__ == "__main__":
    sys.exit(main())
