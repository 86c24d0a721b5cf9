"""A real SLURM of one node on this host: munged, slurmctld and slurmd in a folder, on loopback,
gone without a trace afterwards.

Debian's packages have what is needed (`apt-get install slurm-wlm munge`); nothing of the host's own
configuration is read or changed. It runs as root, since slurmd starts jobs as the users that submit
them. The node claims eight cores, so that tasks are started side by side on any host.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from lockstep.runtime.slurm_step import port

T = TypeVar("T")

_PROGRAMS = [
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scancel",
    "scontrol",
    "squeue",
    "sinfo",
]
_START_SECONDS, _END_SECONDS = 60.0, 30.0
_CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=local NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=local Default=YES MaxTime=INFINITE State=UP
"""


class NoCluster(Exception):
    """There cannot be one here; says why."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where its commands find it."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(
        self, *command: str, cwd: Path | None = None, timeout: float = 100
    ) -> subprocess.CompletedProcess[str]:
        """A command that talks to this cluster."""
        return subprocess.run(
            command,
            cwd=cwd,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def job(self, number: str) -> Mapping[str, str]:
        """What SLURM says of a job: JobState, Restarts, ExitCode ..."""
        shown = self.run("scontrol", "show", "job", "--oneliner", number)
        assert shown.returncode == 0, shown.stderr
        return dict(re.findall(r"(\w+)=(\S+)", shown.stdout))

    def wait(
        self, number: str, over: Callable[[Mapping[str, str]], bool], seconds: float = 200
    ) -> Mapping[str, str]:
        """What it says once `over` of it is true."""

        def look() -> Mapping[str, str] | None:
            job = self.job(number)
            return job if over(job) else None

        return until(look, f"job {number}", seconds)


def until(look: Callable[[], T | None], what: str, seconds: float) -> T:
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return found


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start one in `folder`, and end it with all its jobs. Raises NoCluster where it cannot be
    started.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    programs = {name: shutil.which(name, path=path) for name in _PROGRAMS}
    if missing := [name for name, found in programs.items() if found is None]:
        raise NoCluster(
            f"{', '.join(missing)} not installed (Debian: apt-get install slurm-wlm munge)"
        )
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoCluster("SLURM's daemons are started as root, on Linux")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    ports = [port(str(os.getpid()), number) for number in (3, 4)]
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(folder=folder, host=socket.gethostname(), ports=ports)
    )
    made = Cluster(folder)
    names = [
        f"--{option}={folder}/munge.{option.partition('-')[0]}"
        for option in ("socket", "pid-file", "log-file", "seed-file")
    ]
    with ExitStack() as stack:
        daemons: list[subprocess.Popen[bytes]] = []

        def start(name: str, *options: str) -> None:
            command = [str(programs[name]), *options]
            daemons.append(stack.enter_context(_daemon(name, command, made)))

        start("munged", "--foreground", "--force", f"--key-file={key}", *names)
        _until_up((folder / "munge.socket").exists, daemons, folder)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "local")
        states = ("sinfo", "--noheader", "--format=%T")
        _until_up(lambda: made.run(*states).stdout.strip() == "idle", daemons, folder)
        try:
            yield made
        finally:
            _end_jobs(made)


@contextmanager
def _daemon(name: str, command: list[str], made: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    with open(made.folder / f"{name}.out", "wb") as out:
        process = subprocess.Popen(
            command,
            env=made.env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _until_up(up: Callable[[], bool], daemons: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not up():
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            lines: list[str] = []
            for file in folder.glob("*.out"):
                lines += file.read_text(errors="replace").splitlines()[-3:]
            raise NoCluster(f"SLURM's daemons did not come up: {'; '.join(lines)}")
        time.sleep(0.1)


def _end_jobs(made: Cluster) -> None:
    """Cancel what still runs, and wait until none of its processes is left."""
    made.run("scancel", "--user", "root")
    until(
        lambda: not made.run("squeue", "--noheader").stdout.strip() or None,
        "the queue to be empty",
        _END_SECONDS,
    )
    until(lambda: not _has_step(made) or None, "the steps to end", _END_SECONDS)


def _has_step(made: Cluster) -> bool:
    for process in psutil.process_iter(["name"]):
        if (process.info["name"] or "").startswith("slurmstepd"):
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == made.env["SLURM_CONF"]:
                    return True
    return False
