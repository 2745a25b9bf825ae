"""Connect the ranks that torchrun or srun started, or that `launch` forks; without either, run as one rank."""

import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megazero.base.errors import FailedElsewhere, UserError
from megazero.base.version import __version__
from megazero.comm.collectives import CollectiveError
from megazero.comm.context import CommContext
from megazero.comm.ledger import Ledger
from megazero.launcher.environment import RankContext, world_from_environment
from megazero.launcher.rendezvous import connect, disconnect
from megazero.launcher.spawn import run_local
from megazero.launcher.world import World
from megazero.library.values import Process

T = TypeVar("T")


@dataclass
class _Here:
    """The place of this process among the ranks, its communication context once connected, and its modules."""

    place: RankContext
    comm: CommContext | None = None
    process: Process = field(default_factory=Process)


# One per process, or per thread that acts as a rank: a second `shard` finds the ranks connected.
_HERE: ContextVar[_Here | None] = ContextVar("here", default=None)


def be(place: RankContext, comm: CommContext | None = None) -> None:
    """Make this process, or this thread, a rank for the modules that it shards afterwards.

    Args:
        comm: its communication context, if it is connected to the other ranks.
    """
    _HERE.set(_Here(place, comm))


def meet(timeout: timedelta) -> tuple[World, CommContext, Process]:
    """Connect to the other ranks, if not done yet.

    Returns: this process' place in the world, a communication context with its own ledger, and the process' modules.

    Raises:
        UserError: 111, 3xx, the ranks cannot connect; 510, torch.distributed is initialised already.
        CollectiveError: a rank stopped answering after the roll call.
    """
    here = _HERE.get()
    if here is None:
        here = _Here(RankContext.of(world_from_environment()))
        _HERE.set(here)
    world = here.place.world
    if here.comm is None:
        if world.size > 1 and dist.is_initialized():
            do = "leave init_process_group out: megazero.shard connects the ranks itself"
            raise UserError(510, "torch.distributed is initialised already", do)
        fingerprint = f"megazero {__version__}, torch {torch.__version__}"
        here.comm = connect(here.place, timeout=timeout, fingerprint=fingerprint)
    held = here.comm.ledger.bytes.get("staging")
    comm = replace(here.comm, ledger=Ledger())
    if held is not None:
        comm.ledger.hold("staging", held.now)
    return world, comm, here.process


def launch(function: Callable[..., T], nproc: int, *arguments: Any) -> T:
    """Run a function on `nproc` ranks that are forked from this process; return rank 0's result.

    torch must not have computed with several threads in this process before: a fork does not inherit its threads.

    Args:
        function: called with `arguments` in each rank. Tensors that it returns are copied to host memory.

    Raises:
        UserError: 510, a rank failed (with its message), or rank 0's result cannot be pickled.
        BaseException: the first exception of the function on any rank, with that rank and its traceback as a note; a
            RuntimeError with its name and text if it cannot be pickled and unpickled.
    """
    lines: list[str] = []
    where = getattr(function, "__name__", "launch")
    with ExitStack() as files:
        answer, *raised = (files.enter_context(tempfile.TemporaryFile()) for _ in range(nproc + 1))

        def main(place: RankContext) -> int:
            be(place)
            try:
                found = function(*arguments)
            except (UserError, CollectiveError, FailedElsewhere):  # these are reported in one line
                raise
            except BaseException as error:
                _keep(error, place.world.rank, raised[place.world.rank])
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise UserError(510, f"raised {type(error).__name__}: {error}", where=where) from None
            if place.world.rank == 0:
                _answer(found, answer)
            disconnect()
            return 0

        code = run_local(nproc, main, lambda _, line: lines.append(line), signalled=signal.raise_signal)
        if code:
            if (error := _first_kept(raised)) is not None:
                raise error
            why = lines[0] if lines else f"exit code {code}"
            raise UserError(510, f"a rank failed: {why}", where=where)
        answer.seek(0)
        return cast(T, pickle.load(answer))


def _answer(found: object, file: IO[bytes]) -> None:
    """Write the result of rank 0 into a file. Raises UserError 510: it cannot be pickled."""
    try:
        # Copies, because pickle writes the whole storage of a view.
        copies = tree_map_only(Tensor, lambda x: x.detach().cpu().clone(memory_format=torch.contiguous_format), found)
        pickle.dump(copies, file)
    except Exception as error:  # a class of the user's may raise anything
        do = "return numbers, text, tensors, lists and dictionaries"
        raise UserError(510, f"rank 0 returned a {type(found).__name__}: {error}", do, where="launch") from None
    file.flush()


def _keep(error: BaseException, rank: int, file: IO[bytes]) -> None:
    """Write an exception of this rank into a file."""
    error.add_note(f"on rank {rank}:\n{''.join(traceback.format_exception(error))}")
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # a class of the user's may raise anything
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    pickle.dump((time.monotonic(), error.__notes__, pickled), file)
    file.flush()


def _first_kept(files: Sequence[IO[bytes]]) -> BaseException | None:
    """Return the exception that was raised first on any rank; None: no rank has written one."""
    found: list[tuple[float, list[str], bytes]] = []
    for file in files:
        file.seek(0)
        with suppress(EOFError, pickle.UnpicklingError):  # its rank ended before or while it wrote
            found.append(pickle.load(file))
    if not found:
        return None
    _, notes, pickled = min(found)
    error: BaseException = pickle.loads(pickled)
    error.__notes__ = notes
    return error
