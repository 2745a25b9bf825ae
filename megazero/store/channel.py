"""Connect a rank to the job's store; each side proves that it knows the job's key.

The handshake, of fixed lengths (HMAC-SHA256 throughout; both nonces are drawn for this connection):

    store -> rank    magic, the store's nonce
    rank -> store    the rank's nonce, HMAC(key, "rank", both nonces)
    store -> rank    1, HMAC(key, "store", both nonces); or 0 and the end

Afterwards every message is a frame: length, HMAC, body. The HMAC's key is made of the job's key, the nonces and the
direction, and counts the frames, so that no attacker between the two can change, repeat or drop one. Bodies are not
encrypted: nothing secret is stored.
"""

import hmac
import os
import socket
import struct

MAGIC = b"MZSTORE1"
NONCE = MAC = 32  # bytes
GREETING = len(MAGIC) + NONCE
PROOF = NONCE + MAC
MOST = 1 << 20  # bytes of a body
HEAD = struct.Struct(">I32s")  # bytes of the body, HMAC
_COUNT, _SIZE = struct.Struct(">H"), struct.Struct(">I")
MOST_FIELDS = 1 << 15


class Refused(Exception):  # noqa: N818 - an answer
    """An error for a peer that does not know the job's key, or says that this side does not."""


class Malformed(ValueError):  # noqa: N818 - as ValueError
    """An error for a message that no correct peer would send."""


def proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, side + b":" + nonces, "sha256")


class Seal:
    """The HMACs of the frames of one direction of a connection."""

    def __init__(self, key: bytes, direction: bytes, nonces: bytes):
        self._key, self._number = proof(key, direction, nonces), 0

    def close(self, body: bytes) -> bytes:
        """Return the next frame."""
        assert len(body) <= MOST, f"a message of {len(body)} bytes"
        return HEAD.pack(len(body), self._of(body)) + body

    def check(self, mac: bytes, body: bytes) -> None:
        """Refuse a body that is not the other side's next one. Raises Malformed."""
        if not hmac.compare_digest(mac, self._of(body)):
            raise Malformed("a frame that the other side has not made")

    def _of(self, body: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, struct.pack(">Q", self._number) + body, "sha256")


def body_size(head: bytes) -> tuple[int, bytes]:
    """Return the bytes of a frame's body, and its HMAC. Raises Malformed: too many."""
    size, mac = HEAD.unpack(head)
    if size > MOST:
        raise Malformed(f"a frame of {size} bytes, expected at most {MOST}")
    return size, mac


def pack(fields: list[bytes]) -> bytes:
    """Return the body of a message of several fields."""
    assert len(fields) <= MOST_FIELDS, f"{len(fields)} fields"
    return _COUNT.pack(len(fields)) + b"".join(_SIZE.pack(len(field)) + field for field in fields)


def unpack(body: bytes) -> list[bytes]:
    """Return the fields of a message. Raises Malformed: it is cut off, or has bytes behind them."""
    try:
        (count,), at, fields = _COUNT.unpack_from(body), _COUNT.size, []
        for _ in range(count):
            (size,) = _SIZE.unpack_from(body, at)
            at += _SIZE.size + size
            fields.append(body[at - size : at])
    except struct.error:
        at = -1
    if at != len(body):
        raise Malformed("a message whose fields do not fill it")
    return fields


class Connection:
    """A rank's connection to the store, for one thread.

    Raises:
        Refused: one of the two does not know the key.
        OSError: no server answers, or the connection ended.
    """

    def __init__(self, family: int, address: tuple[str, int], key: bytes, seconds: float):
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(seconds)
            self._socket.connect(address)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._greet(key)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, fields: list[bytes], seconds: float) -> list[bytes]:
        """Send a message; return the answer. Raises OSError and Malformed: there is none within `seconds`."""
        self._socket.settimeout(seconds)
        self._socket.sendall(self._out.close(pack(fields)))
        size, mac = body_size(self._exactly(HEAD.size))
        body = self._exactly(size)
        self._in.check(mac, body)
        return unpack(body)

    def close(self) -> None:
        self._socket.close()

    def _greet(self, key: bytes) -> None:
        greeting = self._exactly(GREETING)
        if not greeting.startswith(MAGIC):
            raise Refused("who answers there is no store of this version")
        mine = os.urandom(NONCE)
        nonces = greeting[len(MAGIC) :] + mine
        self._socket.sendall(mine + proof(key, b"rank", nonces))
        verdict = self._exactly(1)
        if verdict != b"\1":
            raise Refused("rank 0 does not know this rank's token")
        if not hmac.compare_digest(self._exactly(MAC), proof(key, b"store", nonces)):
            raise Refused("who answers there does not know this rank's token")
        self._out, self._in = Seal(key, b"to store", nonces), Seal(key, b"to rank", nonces)

    def _exactly(self, size: int) -> bytes:
        parts, missing = [], size
        while missing:
            if not (part := self._socket.recv(min(missing, 1 << 16))):
                raise ConnectionResetError("the connection was closed")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)
