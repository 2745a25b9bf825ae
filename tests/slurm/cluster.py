"""A SLURM cluster of four nodes on this host: real daemons, their own keys and ports, nothing left behind.

apt-get install slurmctld slurmd slurm-client munge
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "squeue", "sinfo", "srun", "scontrol")
MUNGED = "/usr/sbin/munged"
NODES = 4
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/ended.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,requeue_delay=1
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
KillWait=5
JobRequeue=1
SlurmdParameters=config_overrides
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def obstacle() -> str | None:
    """Why there can be no cluster here."""
    if os.geteuid() != 0:
        return "the daemons want to be root"
    missing = [name for name in (*PROGRAMS, MUNGED) if shutil.which(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which SLURM's commands find it."""
    port = _free_port()
    for name in ("state", "spool", "key"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "key").chmod(0o700)
    (folder / "key/key").write_bytes(os.urandom(128))
    (folder / "key/key").chmod(0o400)
    config = _CONFIG.format(
        folder=folder, host=socket.gethostname(), port=port, nodes=NODES, first=port + 1, last=port + NODES
    )
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # never touched, but read
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    try:
        files = {"key-file": "key/key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "key/seed"
        _run([MUNGED, "--force", *(f"--{k}={folder / v}" for k, v in files.items())], environment)
        _run(["slurmctld"], environment)
        for node in range(1, NODES + 1):
            (folder / f"spool/node{node}").mkdir()
            _run(["slurmd", "-N", f"node{node}"], environment)
        deadline = time.monotonic() + 30
        while _run(["sinfo", "-h", "-N", "-t", "idle"], environment).count("\n") < NODES:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield environment
    finally:
        _end(folder, environment)


def _end(folder: Path, environment: dict[str, str]) -> None:
    with contextlib.suppress(subprocess.SubprocessError):
        _run(["scancel", "--user=root", "--signal=KILL"], environment)
    for path in folder.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):  # steps outlive the daemons that started them
        with contextlib.suppress(OSError):
            step = (process / "comm").read_text().strip() == "slurmstepd"
            if step and str(folder).encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _run(line: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(line, env=environment, check=True, capture_output=True, text=True).stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 65535 - NODES - 1)
