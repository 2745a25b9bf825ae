"""Numbers are read when they have come; the host looks for them, and does not stop anything else."""

import threading
import time

import torch

from megazero.comm.readback import Readback, StoppedError, mark, passed


class Place:
    def __init__(self) -> None:
        self.looks, self.done = 0, False

    def query(self) -> bool:
        self.looks += 1
        return self.done


def test_a_cpu_has_nothing_to_wait_for() -> None:
    assert mark(torch.device("cpu")) is None
    x, y = torch.tensor([1.5, 2.0]), torch.tensor([3])
    assert Readback(x, y).wait()[0].tolist() == [1.5, 2.0]
    assert [copy.tolist() for copy in Readback(x, y).wait()] == [[1.5, 2.0], [3]]


def test_the_host_looks_until_the_device_has_passed_the_mark() -> None:
    place, marked = Place(), []

    def mark_it(device: torch.device) -> Place:
        marked.append(device)
        return place

    readback = Readback(torch.tensor([4.0]), marked=mark_it)
    assert marked == [torch.device("cpu")] and place.looks == 0, "behind the copies, and not looked for yet"
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(readback.wait()[0].tolist()))
    thread.start()
    time.sleep(0.03)
    assert not found and place.looks > 1
    place.done = True
    thread.join(10)
    assert found == [[4.0]]


def test_a_thread_beside_a_device_that_hangs_can_be_told_to_end() -> None:
    stop, ended = threading.Event(), []

    def wait() -> None:
        try:
            passed(Place(), stop)
        except StoppedError:
            ended.append(True)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.02)
    assert not ended
    stop.set()
    thread.join(10)
    assert ended
