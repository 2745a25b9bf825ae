"""Ctrl-C is held back whichever thread takes the signal, and comes at the end."""

import signal
import threading

import pytest

from data_tools.encoding import ctrl_c_held

pytestmark = pytest.mark.usefixtures("usual_signals")


def interrupt_another_thread() -> None:
    """Let a thread that does not block the signal take it, as the kernel does while the main one blocks it."""
    end = threading.Event()

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert thread.ident is not None
    signal.pthread_kill(thread.ident, signal.SIGINT)
    end.set()
    thread.join()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["main thread", "another thread"])
def test_it_comes_at_the_end(elsewhere: bool):
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with ctrl_c_held():
            interrupt_another_thread() if elsewhere else signal.raise_signal(signal.SIGINT)
            steps.append("inside")
        steps.append("outside")
    assert steps == ["inside"]


def test_a_process_that_ignores_it_goes_on():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ctrl_c_held():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_comes_that_was_not_sent():
    with ctrl_c_held():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
