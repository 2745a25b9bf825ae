"""Use the store of an srun step from a rank: torch's Store interface over authenticated connections.

torch calls it from C++, from any thread; each call takes a connection of its own, so that one that waits does not hold
the others up. torch looks the methods up on the Python object: it must live as long as the groups do (`CommContext`
keeps it).
"""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megazero.store.addresses import resolved
from megazero.store.channel import Connection, Malformed
from megazero.store.server import DONE, NUMBER, StoreServer

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts to connect
_ATTEMPT = 5.0  # seconds at most for one
_AGAIN = 10.0  # seconds to connect once more to a rank 0 that was there
_SLACK = 2.0  # seconds that an answer may take beyond the time that it was asked to wait


class NoAnswer(dist.DistNetworkError):
    """An error for a rank 0 that is connected, but does not answer."""


class JobStore(Store):
    """A rank's client of the store.

    Args:
        host, port: where rank 0 listens.
        key: the job's.
        timeout: for connecting, and for every operation without one of its own.
        server: on rank 0 the server, which is closed with the client.

    Raises:
        Refused: rank 0 has another token.
        DistNetworkError: rank 0 cannot be reached within `timeout`.
    """

    def __init__(self, host: str, port: int, key: bytes, timeout: timedelta, server: StoreServer | None = None):
        super().__init__()
        self._timeout = timeout
        self._host, self._port, self._key, self._server = host, port, key, server
        self._lock = threading.Lock()
        self._idle = [self._connected(timeout.total_seconds())]

    def close(self) -> None:
        """End all connections, and the server on rank 0."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
        if self._server is not None:
            self._server.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long operations without a timeout of their own wait."""
        self._timeout = timeout
        super().set_timeout(timeout)

    def clone(self) -> "JobStore":
        return self  # which any number of threads may use

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", _bytes(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask(b"get", self._patience(None), _bytes(key), waits=self._timeout)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask(b"multi_get", self._patience(None), *map(_bytes, keys), waits=self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set, never longer than the store's own timeout, whatever torch's default is."""
        waits = self._timeout if timeout is None else min(timeout, self._timeout)
        self._ask(b"wait", self._patience(waits), *map(_bytes, keys), waits=waits)

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(b"check", *map(_bytes, keys))[0] == b"1"

    def add(self, key: str, value: int) -> int:
        return int(self._ask(b"add", _bytes(key), NUMBER.pack(value))[0])

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", _bytes(key), _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(b"compare_set", _bytes(key), _bytes(expected_value), _bytes(desired_value))[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(b"delete_key", _bytes(key))[0] == b"1"

    def num_keys(self) -> int:
        return int(self._ask(b"num_keys")[0])

    # torch's C++ looks these two up by its own names.
    deleteKey, getNumKeys = delete_key, num_keys

    def has_extended_api(self) -> bool:
        return False

    def _patience(self, waits: timedelta | None) -> bytes:
        return NUMBER.pack(int((waits or self._timeout).total_seconds() * 1000))

    def _ask(self, operation: bytes, *fields: bytes, waits: timedelta | None = None) -> list[bytes]:
        """Send an operation and return the answer's fields.

        Raises:
            DistStoreError: a key was not set in time.
            NoAnswer: rank 0 does not answer.
            DistNetworkError: it has ended.
        """
        seconds = (waits or self._timeout).total_seconds() + (_SLACK if waits is not None else 0.0)
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connected(_AGAIN)
        try:
            answer = connection.ask([operation, *fields], seconds)
        except TimeoutError:
            connection.close()
            raise NoAnswer(f"rank 0 did not answer within {seconds:g} s") from None
        except (OSError, Malformed) as error:
            connection.close()
            raise dist.DistNetworkError(f"the connection to rank 0 broke: {error}") from None
        except BaseException:
            connection.close()  # an answer may still come
            raise
        with self._lock:
            self._idle.append(connection)
        if answer[:1] != [DONE]:
            keys = b", ".join(fields[1:])[:80].decode(errors="replace")
            raise dist.DistStoreError(f"not set within {(waits or self._timeout).total_seconds():g} s: {keys}")
        return answer[1:]

    def _connected(self, seconds: float) -> Connection:
        """Return a new connection; try until time is up, for rank 0 may start later than this rank.

        Raises:
            NoAnswer: rank 0 listens, and answers nothing.
            DistNetworkError: it cannot be reached.
        """
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            left = deadline - time.monotonic()
            try:
                family, address = resolved(self._host)[0]
                return Connection(family, (address, self._port), self._key, max(0.1, min(left, _ATTEMPT)))
            except OSError as error:
                if left <= pause:
                    kind = NoAnswer if isinstance(error, TimeoutError) else dist.DistNetworkError
                    raise kind(str(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)
