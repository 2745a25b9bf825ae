"""The store of an srun step: answers nobody but the step's ranks, and serves torch's process groups."""

import contextlib
import hashlib
import logging
import os
import random
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from megazero.base.errors import UserError
from megazero.store import client as store_client
from megazero.store import server as store_server
from megazero.store.channel import HEAD, MOST, PROOF, Connection, Malformed, Refused, Seal, pack, unpack
from megazero.store.client import JobStore, NoAnswer
from megazero.store.server import NUMBER, StoreServer, check
from megazero.store.token import Secret

KEY = hashlib.sha256(b"job").digest()
LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.3)


class Served:
    """A server on the loopback, and its clients."""

    def __init__(self) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        self.address: tuple[str, int] = listener.getsockname()
        self.server = StoreServer(listener, KEY)
        self.clients: list[JobStore] = []

    def client(self, key: bytes = KEY, timeout: timedelta = LONG) -> JobStore:
        self.clients.append(JobStore(*self.address, key, timeout))
        return self.clients[-1]

    def raw(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    for client in made.clients:
        client.close()
    made.server.close()


def closed(connection: socket.socket) -> bool:
    """Whether the server ends a connection, whatever it says before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_it_does_what_torch_asks_of_a_store(served: Served):
    client = served.client()
    store = PrefixStore("group", client)
    store.set("a", "1")
    assert (store.get("a"), store.add("n", 5), store.add("n", -7)) == (b"1", 5, -2)
    assert store.check(["a", "n"]) and not store.check(["a", "b"])
    assert store.compare_set("c", "", "x") == b"x" and store.compare_set("c", "y", "z") == b"x"
    assert store.compare_set("c", "x", "z") == b"z" and store.compare_set("d", "x", "z") == b"x"
    client.append("group/c", "more")
    assert store.multi_get(["c", "a"]) == [b"zmore", b"1"]
    assert store.num_keys() == 3 and store.delete_key("a") and not store.delete_key("a") and store.num_keys() == 2
    assert client.clone().get("group/c") == b"zmore"
    with pytest.raises(dist.DistStoreError, match=r"not set within 0\.2 s: group/never"):
        store.wait(["never"], timedelta(seconds=0.2))


def test_who_waits_does_not_hold_up_other_threads(served: Served):
    store, got = served.client(), []
    waiting = threading.Thread(target=lambda: got.append(store.get("late")))
    waiting.start()
    store.set("late", "now")
    waiting.join(30)
    assert got == [b"now"]


def test_nobody_waits_longer_than_the_store(served: Served):
    """torch gives some groups half an hour, whatever the run's timeout is."""
    with pytest.raises(dist.DistStoreError):
        served.client(timeout=SHORT).wait(["never"], timedelta(minutes=30))


def test_the_timeout_can_be_set(served: Served):
    client = served.client()
    client.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"not set within 0\.3 s: never"):
        client.get("never")


def test_a_rank_0_that_was_there_and_is_stopped_does_not_answer(served: Served, monkeypatch: pytest.MonkeyPatch):
    """Also where a new connection is needed: the kernel takes it, and nobody greets."""
    monkeypatch.setattr(store_client, "_AGAIN", 0.3)
    client = served.client()
    waiting = threading.Thread(target=lambda: client.wait(["late"]))
    waiting.start()  # has the connection that there is
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client._port = silent.getsockname()[1]
        with pytest.raises(NoAnswer):
            client.set("a", "1")
    client._port = served.address[1]
    client.set("late", "")
    waiting.join(30)


def test_another_token_is_refused_before_any_key_is_read(served: Served):
    served.client().set("secret", "1")
    with pytest.raises(Refused, match="rank 0 does not know this rank's token"):
        served.client(hashlib.sha256(b"another").digest())
    with served.raw() as connection:  # says nothing true, and asks at once
        connection.sendall(os.urandom(PROOF) + Seal(KEY, b"to store", bytes(64)).close(pack([b"get", b"secret"])))
        said = b""
        while part := receive(connection):
            said += part
    assert said[:8] == b"MZSTORE1" and said[40:] in (b"", b"\0")


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""


def test_a_server_without_the_token_is_refused():
    """Another user's program that was faster to listen where the ranks meet."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as connection:
                connection.sendall(b"MZSTORE1" + bytes(32))
                connection.recv(PROOF)
                connection.sendall(b"\1" + bytes(32))

        impostor = threading.Thread(target=answer)
        impostor.start()
        with pytest.raises(Refused, match="who answers there does not know"):
            JobStore("127.0.0.1", listener.getsockname()[1], KEY, LONG)
        impostor.join(30)


def test_garbage_ends_its_own_connection_and_nothing_else(served: Served):
    chance, store = random.Random(0), served.client()
    store.set("a", "1")
    for size in (1, PROOF - 1, PROOF, PROOF + 1, 5000):
        for _ in range(20):
            with served.raw() as connection:
                connection.sendall(chance.randbytes(size))
                connection.shutdown(socket.SHUT_WR)
                assert closed(connection)
    assert store.get("a") == b"1"


MALFORMED = {
    "too long": HEAD.pack(MOST + 1, bytes(32)),
    "another's": HEAD.pack(4, bytes(32)) + b"\0\0\0\0",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_frames_that_no_rank_sends_end_the_connection(served: Served, case: str):
    connection = Connection(socket.AF_INET, served.address, KEY, 20)
    connection._socket.sendall(MALFORMED[case])
    assert closed(connection._socket)
    connection.close()
    served.client().set("a", "still there")


BODIES = [
    [],
    [b"no such thing"],
    [b"_answer"],
    [b"set", b"k"],
    [b"set", b"k", b"v", b"more"],
    [b"set", b"", b"v"],
    [b"set", b"k" * 1025, b"v"],
    [b"add", b"k", b"5"],
    [b"add", b"word", NUMBER.pack(1)],
    [b"wait", b"", b"k"],
    [b"wait", NUMBER.pack(1)],
    [b"check"],
    [b"num_keys", b"x"],
]


@pytest.mark.parametrize("fields", BODIES, ids=str)
def test_messages_are_checked_against_the_table(served: Served, fields: list[bytes]):
    store = served.client()
    store.set("word", "no number")
    connection = Connection(socket.AF_INET, served.address, KEY, 20)
    with pytest.raises(OSError, match=r"clos|reset"):
        connection.ask(fields, 20)
    connection.close()
    assert store.get("word") == b"no number"


def test_fuzz_of_messages():
    """Only typed errors, whatever the bytes are; what is taken comes out as it went in."""
    chance = random.Random(1)
    fields = [b"compare_set", b"key", b"expected", b"desired"]
    assert unpack(pack(fields)) == fields and check(fields) == b"compare_set"
    for _ in range(10_000):
        body = bytearray(pack(fields))
        for _ in range(chance.randint(1, 3)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        with contextlib.suppress(Malformed):
            check(unpack(bytes(body[: chance.randint(0, len(body))])))


def test_who_proves_nothing_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_server, "HANDSHAKE", 0.05)
    with served.raw() as connection:
        assert closed(connection)


def test_a_flood_of_silent_connections_does_not_keep_ranks_out(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_server, "MOST_GREETED", 8)
    monkeypatch.setattr(store_server, "HANDSHAKE", 3600.0)
    flood = [served.raw() for _ in range(100)]
    served.client().set("a", "1")
    assert sum(closed(connection) for connection in flood[:80]) == 80, "the oldest were ended, not one over and over"
    for connection in flood:
        connection.close()


def test_a_refusal_is_logged_once_for_each_address(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_server, "_LOOK", 0.01)
    log, written = logging.getLogger("megazero"), threading.Event()
    monkeypatch.setattr(log, "handlers", [])  # of a run earlier in this process

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())
            written.set()

    for _ in range(5):
        with pytest.raises(Refused):
            served.client(bytes(32))
    log.addHandler(handler := Lines())
    try:
        assert written.wait()
    finally:
        log.removeHandler(handler)
    assert lines == ["the store refused a connection from 127.0.0.1: does not know this job's token"]


def test_frames_are_neither_repeated_nor_changed():
    nonces = os.urandom(64)
    sender, reader = Seal(KEY, b"to store", nonces), Seal(KEY, b"to store", nonces)
    frame = sender.close(b"body")
    _, mac = HEAD.unpack(frame[: HEAD.size])
    reader.check(mac, b"body")
    with pytest.raises(Malformed):
        reader.check(mac, b"body")
    with pytest.raises(Malformed):
        Seal(KEY, b"to rank", nonces).check(mac, b"body")


def secret(folder: Path, token: str | None = None, step: str = "1 0 0") -> Secret:
    return Secret(token, folder, step)


def test_the_secret_is_made_once_and_for_the_user_alone(tmp_path: Path):
    folder = tmp_path / "config" / "megazero"
    keys: list[bytes] = []
    ranks = [threading.Thread(target=lambda: keys.append(secret(folder).key())) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(keys) == 8 and len(set(keys)) == 1
    assert [path.name for path in folder.iterdir()] == ["token"]
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert secret(folder, step="1 0 1").key() != keys[0], "another attempt has another key"
    assert "'" not in repr(secret(folder, "x" * 64)).replace("'1 0 0'", "").replace(f"'{folder}'", "")


def open_to_all(path: Path) -> None:
    path.chmod(0o644)


def of_another(path: Path) -> None:
    os.chown(path, 12345, 12345)


def a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def short(path: Path) -> None:
    path.write_text("0123456789")


@pytest.mark.parametrize("spoil", [open_to_all, of_another, a_link, a_pipe, short])
def test_a_secret_that_is_not_the_users_alone_is_refused(tmp_path: Path, spoil):
    if spoil is of_another and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    secret(tmp_path / "megazero").key()
    spoil(tmp_path / "megazero" / "token")
    with pytest.raises(UserError, match=r"^MZ-119 .*/token: ") as caught:
        secret(tmp_path / "megazero").key()
    assert caught.value.exit_code == 2


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path):
    (tmp_path / "megazero").mkdir(mode=0o755)
    (tmp_path / "megazero").chmod(0o755)
    with pytest.raises(UserError, match="expected mode 0700, got 0755: others may read it"):
        secret(tmp_path / "megazero").key()


@pytest.mark.parametrize("token", ["", "short", "x" * 257, "ü" * 32, "\n" * 40])
def test_a_token_that_is_none_is_refused(tmp_path: Path, token: str):
    with pytest.raises(UserError, match=r"^MZ-119 MEGAZERO_TOKEN: expected 32 to 256 printable ASCII"):
        secret(tmp_path, token).key()


GROUPS = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from megazero.store.client import JobStore, NoAnswer

def group(host, port, rank):
    store = JobStore(host, int(port), bytes(32), timedelta(seconds=60))
    dist.init_process_group("gloo", store=PrefixStore("g", store), rank=int(rank), world_size=2)
    x = torch.ones(2)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    print(x.tolist())
    dist.destroy_process_group()

group(*sys.argv[1:])
"""


def test_torch_makes_groups_over_it():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    host, port = listener.getsockname()
    server = StoreServer(listener, bytes(32))
    lines = [[sys.executable, "-c", GROUPS, host, str(port), str(rank)] for rank in (0, 1)]
    root = Path(__file__).parents[2]
    ranks = [subprocess.Popen(line, cwd=root, stdout=subprocess.PIPE, text=True) for line in lines]
    assert [rank.communicate()[0] for rank in ranks] == ["[2.0, 2.0]\n"] * 2
    server.close()
