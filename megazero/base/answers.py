"""Print the output of commands: answers on standard output, everything else on standard error."""

import atexit
import io
import json
import os
import sys
from contextlib import suppress

from megazero.base.errors import UserError, one_line
from megazero.base.heartbeat import HEART
from megazero.base.terminal import fitted, width


def answer(text: str) -> None:
    """Print the answer of a verb. A reader that closes the pipe early (`| head`) is no fault.

    Raises:
        UserError: 405, standard output cannot be written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # any text on any terminal
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with HEART.paused():
            print(text, flush=True)
    except BrokenPipeError:
        return
    except OSError as error:
        raise UserError(405, f"standard output: {error.strerror}", "free space there") from None


def show(found: object, text: str, *, as_json: bool) -> None:
    """Print what a verb found: an object as JSON, or a text that fits the terminal. Raises UserError 405."""
    answer(json.dumps(found, indent=1) if as_json else fitted(text, width()))


def flush_output() -> None:
    """Flush standard output: at exit Python would fail with exit code 120. Output that has no reader is dropped."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def leave(code: int) -> int:
    """End this process and skip torch's teardown, which takes a second; return the exit code where torch is not loaded.

    The registered exit functions run and the output is flushed first, as Python would do.
    """
    if "torch" not in sys.modules:
        return code
    atexit._run_exitfuncs()
    flush_output()  # standard error has no buffer beyond a line
    os._exit(code)


def fail(said: object, code: int) -> int:
    """Print on standard error why a verb ends; return its exit code."""
    tell(said)
    return code


def tell(line: object) -> None:
    """Write a line on standard error; without one the process goes on, because a message is not worth it."""
    with HEART.paused(), suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Write a warning as one line on standard error."""
    tell(one_line(f"warning: {text}"))
