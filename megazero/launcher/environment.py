"""Find a process' place in the world from environment variables, before torch is imported.

Elsewhere only `kernels/build.py` reads variables. A run is started in one of three ways, each with its own variables:

    torchrun      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    srun          SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, the step's nodes, the job's id
    train.py      nothing: it starts the local ranks itself (`spawn.py`)
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megazero.base.errors import UserError
from megazero.comm.status_board import StatusBoard, StatusSlot
from megazero.launcher.signals import Signals
from megazero.launcher.stacks import Stacks
from megazero.launcher.world import World

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
MEETING = ("MASTER_ADDR", "MASTER_PORT")
DO = "unset them or start through torchrun"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_FIRST_PORT, _NUM_PORTS = 20000, 10000
_SHOWN = 40  # characters of a value in an error
# Environment variables of a run on GPUs, read when CUDA starts; values that the user has set are kept.
GPU_SETTINGS = {
    # Queues of the device. Streams that share a queue wait for each other, and a receive holds its queue until the
    # other rank sends. A rank has more streams (one per communicator, copies) than the default of 8 queues.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Load kernels at the start. A kernel that is loaded at its first use waits for everything that the device runs,
    # also for a receive, whose sender may wait for this rank.
    "CUDA_MODULE_LOADING": "EAGER",
    # Operations that NCCL's flight recorder keeps; a rank that hangs reports them (`monitor.py`).
    "TORCH_FR_BUFFER_SIZE": "2000",
}


@dataclass(frozen=True, eq=False)
class RankContext:
    """The context of a rank: its world, its status slot, and the file of the store if a local parent made one."""

    world: World
    status_slot: StatusSlot
    store: Path | None = None
    signals: Signals = field(default_factory=Signals)
    stacks: Stacks = field(default_factory=Stacks)

    @classmethod
    def of(cls, world: World) -> "RankContext":
        """Return the context of a process without a local parent; its status slot is private until ranks connect."""
        status_slot = StatusBoard().status_slot(0)
        status_slot.take(host_name())
        return cls(world, status_slot)


@dataclass(frozen=True)
class Meeting:
    """The address at which the ranks of an srun step meet.

    Attributes:
        host, port: rank 0's address.
        interface: network interface that it listens on, if one is named.
        nodes: hosts of the step.
    """

    host: str
    port: int
    interface: str | None
    nodes: int = 1


def world_from_environment(environment: Mapping[str, str] = os.environ) -> World:
    """Return the world that torchrun (RANK, WORLD_SIZE, LOCAL_RANK) or srun (SLURM_PROCID, SLURM_NTASKS, ...) set.

    If neither did, the world is one process. Invalid values, or only some of torchrun's three, raise UserError 111:
    ranks that each took themselves for the whole run would write into one folder.
    """
    for launcher, names in (("torchrun", TORCHRUN), ("srun", SLURM)):
        if all(name in environment for name in names):
            world = _world(names, environment, launcher)
            lacking = [n for n in MEETING if n not in environment]
            if launcher == "srun" and world.size == 1:  # a shell in a job of one task: local ranks may be started
                continue
            if launcher == "torchrun" and world.size > 1 and lacking:
                raise UserError(111, f"WORLD_SIZE={world.size}, but {' and '.join(lacking)} not set", DO)
            if world.size > 1 and "MASTER_PORT" in environment:
                _port(environment)
            return world
    given = [name for name in TORCHRUN if name in environment]
    if "WORLD_SIZE" in given or "RANK" in given:
        missing = [name for name in TORCHRUN if name not in environment]
        raise UserError(111, f"{' and '.join(given)} set, {' and '.join(missing)} not", DO)
    return World(rank=0, size=1, local_rank=0)


def local_size(asked: int | None, tensor: int, pipeline: int, *, shares_gpus: bool = False) -> int:
    """Return how many ranks to start on this machine: as requested, else one per GPU, else tensor x pipeline.

    Args:
        shares_gpus: there may be more ranks than GPUs; the default is then the smallest multiple of tensor x
            pipeline that gives each GPU a rank.

    Raises:
        UserError: 106, more ranks than GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    if asked and gpus and asked > gpus and not shares_gpus:
        what = f"expected --nproc <= {gpus} GPUs, got {asked}"
        raise UserError(106, what, "give fewer ranks, or train with --share-gpus", where="train")
    split = tensor * pipeline
    return asked or (max(1, -(-gpus // split)) * split if shares_gpus else gpus or split)


def check_gpus(world: World) -> None:
    """Refuse a rank without a GPU of its own on a host with GPUs, unless ranks share them.

    Raises:
        UserError: 106, more ranks than GPUs.
    """
    import torch

    gpus = torch.cuda.device_count()
    if world.shares_gpus or not gpus:
        return
    # A task of srun may see one GPU, its own; torchrun shows all of them to every rank.
    if world.local_rank >= gpus and (gpus > 1 or world.launcher == "torchrun"):
        what = f"expected at most {gpus} ranks on a host of {gpus} GPUs, got local rank {world.local_rank}"
        raise UserError(106, what, "start fewer ranks, or train with --share-gpus", rank=world.rank)


def meeting_of_step(environment: Mapping[str, str] = os.environ, known: Sequence[str] | None = None) -> Meeting:
    """Return the address at which the ranks of an srun step meet; it is equal on every rank.

    The host is MASTER_ADDR, else the step's first node. The port is MASTER_PORT, else made of the job's id (each task
    of an array has its own), the number of requeues, and the step. So neither an earlier attempt that still holds its
    port nor another step of the job is in the way.

    Args:
        known: this host's network interfaces, one of which *_SOCKET_IFNAME may name; None: ask the system.

    Raises:
        UserError: 111, no node list or job id, or an invalid value.
    """
    host = environment.get("MASTER_ADDR")
    if host is None:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise UserError(111, "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set", "set MASTER_ADDR to a host name")
        host = first_host(nodes)
    if "MASTER_PORT" in environment:
        port = _port(environment)
    else:
        job, restart, step = (
            _number(environment, name, default)
            for name, default in (("SLURM_JOB_ID", None), ("SLURM_RESTART_COUNT", 0), ("SLURM_STEP_ID", 0))
        )
        port = _FIRST_PORT + (job + 101 * restart + 1009 * step) % _NUM_PORTS
    known = known if known is not None else [name for _, name in socket.if_nameindex()]
    named = [environment[name] for name in INTERFACES if environment.get(name) in known]
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", _number(environment, "SLURM_JOB_NUM_NODES", 1))
    # NCCL also takes prefixes, lists and exclusions ("^docker"), which name no single interface.
    return Meeting(host, port, named[0] if named else None, nodes)


def master(environment: Mapping[str, str] = os.environ) -> str:
    """Return where the ranks of torchrun meet, as host:port."""
    return f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"


def stay_on(interface: str, environment=os.environ) -> None:
    """Make backends listen on `interface`, unless the user has named another for them."""
    for name in INTERFACES:
        environment.setdefault(name, interface)


def set_for_gpus(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the CUDA and NCCL variables of a run on GPUs that the user has not set; call it before CUDA starts.

    Limit torch's C++ log to errors, because torch warns with a stack of each connection to a store that has ended.
    """
    for name, value in {**GPU_SETTINGS, "TORCH_CPP_LOG_LEVEL": "ERROR"}.items():
        environment.setdefault(name, value)


def gpu_settings(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text of the CUDA and NCCL settings, which marks values other than those of `set_for_gpus`."""
    given = [(name, environment.get(name, "not set"), ours) for name, ours in GPU_SETTINGS.items()]
    return ", ".join(f"{name}={value}" + (f" (not {ours})" if value != ours else "") for name, value, ours in given)


def interfaces_named(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the network interface that each backend was set to use, by the variable that sets it."""
    return {name: environment[name] for name in INTERFACES if environment.get(name)}


def attempt(environment: Mapping[str, str] = os.environ) -> str:
    """Return how often torchrun has restarted its workers, which keep the same store."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0")


def job_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return the scheduler's id of this job, "" if there is no scheduler."""
    return environment.get("SLURM_JOB_ID", "")


def step(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that identifies this srun step, equal on all its ranks."""
    return " ".join(environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))


def job_output(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the batch script's output, if the script sets MEGAZERO_OUTPUT to it; else None."""
    return Path(given) if (given := environment.get("MEGAZERO_OUTPUT")) else None


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return this host's name; in a SLURM job its node name, because SLURM's commands know no other."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def threads_for(size: int) -> int | None:
    """Return the threads per rank if `size` ranks share this machine's cores; None if OMP_NUM_THREADS is set."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, len(os.sched_getaffinity(0)) // size)


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's node list: node[003-007,9],gpu1 -> node003, a[1-2]b[3-4] -> a1b3."""
    host = re.split(r",(?![^\[]*\])", nodes)[0]  # at the first comma outside brackets
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", host)


def _port(environment: Mapping[str, str]) -> int:
    port = _number(environment, "MASTER_PORT")
    if not 1 <= port < 1 << 16:
        raise UserError(111, f"expected MASTER_PORT in 1 to 65535, got {port}", "set MASTER_PORT to a free port")
    return port


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"[0-9]{1,9}", text):
        got = "is not set" if text is None else f"is {text[:_SHOWN] or 'empty'}"
        raise UserError(111, f"{name} {got}, expected a number", "set MASTER_ADDR and MASTER_PORT")
    return int(text)


def _world(names: tuple[str, str, str], environment: Mapping[str, str], launcher: str) -> World:
    texts = [environment[name] for name in names]
    if all(re.fullmatch(r"[0-9]{1,9}", text) for text in texts):
        rank, size, local_rank = map(int, texts)
        if rank < size:
            return World(rank, size, local_rank, launcher)
    got = ", ".join(f"{name}={text[:_SHOWN]}" for name, text in zip(names, texts, strict=True))
    raise UserError(111, f"expected 0 <= rank < size and local rank >= 0, got {got}", DO)


def fix_cublas_workspace() -> None:
    """Give cuBLAS a workspace of fixed size per stream; without it, its products may differ between runs.

    cuBLAS reads the variable when it computes the first product. A value that the user has set is kept.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
