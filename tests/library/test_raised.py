"""An exception of the user's under `launch` reaches the caller as it is, with the rank and its traceback; at once."""

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.base.errors import UserError


class OwnError(Exception):
    """A class of the user's."""

    def __init__(self, low: int, high: int):
        super().__init__(low, high)
        self.high = high
        self.add_note("my own note")


class OddError(Exception):
    """One that pickle cannot make again: it takes two arguments and passes on one."""

    def __init__(self, low: int, high: int):
        super().__init__(f"not in {low} to {high}")


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise LookupError("in a backward of mine")


class Faulty(nn.Module):
    def __init__(self, where: str):
        super().__init__()
        self.linear, self.where = nn.Linear(2, 2), where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            raise LookupError("in a forward of mine")
        return InBackward.apply(self.linear(x))


def value() -> None:
    raise ValueError("my own bug")


def own() -> None:
    raise OwnError(1, 2)


def odd() -> None:
    raise OddError(1, 2)


def local() -> None:
    class LocalError(KeyError):
        pass

    raise LocalError("made inside")


def with_a_function() -> None:
    error = RuntimeError("holds what cannot be pickled")
    error.function = lambda: None  # type: ignore[attr-defined]
    raise error


def group() -> None:
    raise ExceptionGroup("several", [ValueError("a"), TypeError("b")])


def asked_to_exit() -> None:
    sys.exit(7)


def interrupted() -> None:
    raise KeyboardInterrupt


def full() -> None:
    raise OSError(errno.ENOSPC, "no room", "my file")


def in_a_module(where: str) -> None:
    sharded = megazero.shard(Faulty(where), "adamw", stage=3)
    sharded.backward(sharded(torch.ones(1, 2)).sum())


def on_rank_1_alone() -> None:
    sharded = megazero.shard(nn.Linear(2, 2), "adamw", stage=3)
    if sharded.rank == 1:
        raise StopIteration("while rank 0 waits for the gathering")
    sharded(torch.ones(1, 2))


RAISED: dict[str, tuple[Callable[..., None], tuple[Any, ...], type[BaseException], str]] = {
    "value": (value, (), ValueError, "my own bug"),
    "of a class of the user's": (own, (), OwnError, "(1, 2)"),
    "not to be made again": (odd, (), RuntimeError, "OddError: not in 1 to 2"),
    "of a local class": (local, (), RuntimeError, "LocalError: 'made inside'"),
    "not to be pickled": (with_a_function, (), RuntimeError, "holds what"),
    "group": (group, (), ExceptionGroup, "several"),
    "exit": (asked_to_exit, (), SystemExit, "7"),
    "interruption": (interrupted, (), KeyboardInterrupt, ""),
    "OSError": (full, (), OSError, "no room"),
    "forward": (in_a_module, ("forward",), LookupError, "in a forward of mine"),
    "backward": (in_a_module, ("backward",), LookupError, "in a backward of mine"),
    "one rank": (on_rank_1_alone, (), StopIteration, "while rank 0 waits"),
}


@pytest.mark.parametrize("case", RAISED)
def test_an_exception_reaches_the_caller_as_it_is(case: str, capfd: pytest.CaptureFixture[str]):
    function, arguments, kind, text = RAISED[case]
    with pytest.raises(kind) as raised:
        megazero.launch(function, 2, *arguments)
    error = raised.value
    assert type(error) is kind and text in str(error)
    *own_notes, note = error.__notes__
    assert own_notes == (["my own note"] if kind is OwnError else [])
    assert note.startswith("on rank 1:" if case == "one rank" else "on rank ") and function.__name__ in note
    assert "Traceback (most recent call last)" in note and __file__ in note
    assert getattr(error, "high", 2) == 2 and getattr(error, "errno", errno.ENOSPC) == errno.ENOSPC
    assert getattr(error, "code", 7) == 7
    assert "MZ-390" not in capfd.readouterr().err


def stops_its_launcher(parent: int) -> None:
    if os.getppid() == parent:
        os.kill(parent, signal.SIGINT)
    signal.pause()


def test_an_interruption_of_the_launcher_is_one(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(KeyboardInterrupt):
        megazero.launch(stops_its_launcher, 2, os.getpid())


def leaves() -> None:
    os._exit(5)


def test_a_rank_that_ends_without_an_exception_is_named():
    with pytest.raises(UserError, match=r"MZ-510 leaves: a rank failed: MZ-313 rank=\d.*exit code 5"):
        megazero.launch(leaves, 2)


def aborts() -> None:
    os.kill(os.getpid(), signal.SIGABRT)  # as a failed allocation in C++ does


@pytest.mark.parametrize("limited", [True, False])
def test_a_rank_that_dies_under_a_limit_of_its_address_space_says_so(limited: bool):
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if limited:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 44, hard))
    try:
        with pytest.raises(UserError, match=r"MZ-310 .*SIGABRT") as refused:
            megazero.launch(aborts, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert ("is limited to 16,777,216 MB: raise `ulimit -v`" in str(refused.value)) == limited
