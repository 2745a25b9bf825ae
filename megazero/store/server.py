"""Serve the job's store: keys and values of one srun step, in a thread of rank 0.

It replaces torch's, which lets any process read and write. It listens on one address; a connection proves that it knows
the job's key before its messages are parsed (`channel.py`); then each message is checked against the table of
operations below. A violation ends that connection alone, and is logged once for each address.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import resource
import socket
import struct
import threading

from megazero.store.channel import (
    HEAD,
    MAGIC,
    MOST,
    NONCE,
    PROOF,
    Malformed,
    Seal,
    body_size,
    pack,
    proof,
    unpack,
)

HANDSHAKE = 5.0  # seconds that a connection has to prove that it is one of the job's
MOST_GREETED = 4096  # connections that have not yet; one more ends the oldest of them
LONGEST_KEY = 1024  # bytes
LONGEST_WAIT = 1 << 31  # milliseconds
NUMBER = struct.Struct(">q")
_MOST_LOGGED = 64  # addresses
_LOOK = 0.5  # seconds between looks whether there is a log to write to

# Fields of each operation: k a key, v a value, n a number, * as many of the last kind as there are.
OPERATIONS = {
    b"set": "kv",
    b"get": "nk",
    b"multi_get": "nk*",
    b"wait": "nk*",
    b"check": "k*",
    b"add": "kn",
    b"append": "kv",
    b"compare_set": "kvv",
    b"delete_key": "k",
    b"num_keys": "",
}
DONE, LATE = b"done", b"late"  # an answer's first field


def check(fields: list[bytes]) -> bytes:
    """Return the operation of a message. Raises Malformed: it is unknown, or has other fields."""
    kinds = OPERATIONS.get(fields[0] if fields else b"")
    if kinds is None:
        raise Malformed("an operation that there is not")
    given = len(fields) - 1
    if kinds.endswith("*"):
        kinds = kinds[:-1] + kinds[-2] * (given - len(kinds) + 1)
    if given != len(kinds):
        raise Malformed(f"{fields[0].decode()} with {given} fields")
    for kind, field in zip(kinds, fields[1:], strict=True):
        if kind == "k" and not 1 <= len(field) <= LONGEST_KEY:
            raise Malformed(f"a key of {len(field)} bytes")
        if kind == "n" and len(field) != NUMBER.size:
            raise Malformed(f"a number of {len(field)} bytes")
    return fields[0]


class StoreServer:
    """A server that runs from its construction until `close`, or the end of the process.

    Args:
        listener: a socket that listens; the server owns it from here on.
        key: the job's.
    """

    def __init__(self, listener: socket.socket, key: bytes):
        self._listener, self._key = listener, key
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 2,048 ranks are more than the usual 1,024
        self._values: dict[bytes, bytes] = {}
        self._awaited: dict[bytes, asyncio.Event] = {}
        self._greeted: dict[asyncio.StreamWriter, str] = {}  # the oldest first
        self._refused: dict[str, str] = {}  # by address; "" once it is in the log
        self._actions = {name: getattr(self, f"_{name.decode()}") for name in OPERATIONS}
        self._logging: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _serve(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._until_stopped())

    async def _until_stopped(self) -> None:
        server = await asyncio.start_server(self._meet, sock=self._listener, backlog=1024)
        await self._stop.wait()
        server.close()
        for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from its first to its last byte."""
        address = str((writer.get_extra_info("peername") or ("?",))[0])
        try:
            if len(self._greeted) >= MOST_GREETED:
                oldest = next(iter(self._greeted))
                del self._greeted[oldest]
                oldest.transport.abort()
            self._greeted[writer] = address
            try:
                seals = await asyncio.wait_for(self._greet(reader, writer), HANDSHAKE)
            except TimeoutError:
                return self._note(address, f"did not prove within {HANDSHAKE:g} s that it belongs to this job")
            finally:
                self._greeted.pop(writer, None)
            while True:
                await self._answer(reader, writer, *seals)
        except asyncio.IncompleteReadError as error:
            if error.partial or error.expected == PROOF:  # else it ended between two messages
                self._note(address, "ended in the middle of a message")
        except Malformed as error:
            self._note(address, str(error))
        except (OSError, asyncio.CancelledError):
            pass  # the other side's end, or `close`
        finally:
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Seal, Seal]:
        """Return the seals of a connection (in, out) that knows the key."""
        mine = os.urandom(NONCE)
        writer.write(MAGIC + mine)
        answer = await reader.readexactly(PROOF)
        nonces = mine + answer[:NONCE]
        if not hmac.compare_digest(answer[NONCE:], proof(self._key, b"rank", nonces)):
            writer.write(b"\0")
            await writer.drain()
            raise Malformed("does not know this job's token")
        writer.write(b"\1" + proof(self._key, b"store", nonces))
        return Seal(self._key, b"to store", nonces), Seal(self._key, b"to rank", nonces)

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Seal, outgoing: Seal
    ) -> None:
        size, mac = body_size(await reader.readexactly(HEAD.size))
        body = await reader.readexactly(size)
        incoming.check(mac, body)
        fields = unpack(body)
        answer = pack(await self._actions[check(fields)](*fields[1:]))
        if len(answer) > MOST:
            raise Malformed(f"asks for {len(answer)} bytes at once")
        writer.write(outgoing.close(answer))
        await writer.drain()

    async def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self._values[key] = value
        if key in self._awaited:
            self._awaited.pop(key).set()
        return [DONE]

    async def _wait(self, milliseconds: bytes, *keys: bytes) -> list[bytes]:
        (most,) = NUMBER.unpack(milliseconds)
        try:
            async with asyncio.timeout(min(max(most, 0), LONGEST_WAIT) / 1000):
                for key in keys:
                    while key not in self._values:
                        await self._awaited.setdefault(key, asyncio.Event()).wait()
        except TimeoutError:
            return [LATE]
        return [DONE]

    async def _multi_get(self, milliseconds: bytes, *keys: bytes) -> list[bytes]:
        waited = await self._wait(milliseconds, *keys)
        return waited + [self._values[key] for key in keys] if waited == [DONE] else waited

    _get = _multi_get

    async def _check(self, *keys: bytes) -> list[bytes]:
        return [DONE, b"1" if all(key in self._values for key in keys) else b"0"]

    async def _add(self, key: bytes, number: bytes) -> list[bytes]:
        before = self._values.get(key, b"0")
        if not before.lstrip(b"-").isdigit() or len(before) > 19:
            raise Malformed("adds to what is no number")
        (more,) = NUMBER.unpack(number)
        after = b"%d" % (int(before) + more)
        return [*await self._set(key, after), after]

    async def _append(self, key: bytes, value: bytes) -> list[bytes]:
        return await self._set(key, self._values.get(key, b"") + value)

    async def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        """Set a key if it holds `expected`, as torch does.

        An absent key counts as empty, and returns `expected` where that is not empty.
        """
        if self._values.get(key, b"") == expected:
            await self._set(key, desired)
        return [DONE, self._values.get(key, expected)]

    async def _delete_key(self, key: bytes) -> list[bytes]:
        return [DONE, b"1" if self._values.pop(key, None) is not None else b"0"]

    async def _num_keys(self) -> list[bytes]:
        return [DONE, b"%d" % len(self._values)]

    def _note(self, address: str, what: str) -> None:
        """Log what a connection did, if it is the first of its address."""
        if address not in self._refused and len(self._refused) < _MOST_LOGGED:
            self._refused[address] = what
            if self._logging is None or self._logging.done():
                self._logging = asyncio.create_task(self._log())

    async def _log(self) -> None:
        """Write refused connections to rank 0's log once, when it exists: it begins when the ranks have met."""
        log = logging.getLogger("megazero")
        while not log.handlers:
            await asyncio.sleep(_LOOK)
        for address, what in self._refused.items():
            if what:
                log.warning("the store refused a connection from %s: %s", address, what)
                self._refused[address] = ""
