"""SLURM's variables for this process: which task of which job step it is. Pure: the functions read
only the environment they are given.

SLURM sets the same variables in three places, with different meanings. In a task of `srun` they
describe the task. In a batch script's shell they describe the job, of which no task runs yet:
SLURM_PROCID is 0, and SLURM_NTASKS is the number of tasks asked for. In the shell of `salloc` there
is no SLURM_PROCID, or the step is the one that runs the shell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.knob import value_of, whole
from lockstep.errors import UsageError

RANK, SIZE, LOCAL_RANK = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
_ASKED_PER_NODE = "SLURM_NTASKS_PER_NODE"
_STEP = "SLURM_STEP_ID"
_SPREAD = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# step numbers that SLURM reserves for a batch script, an interactive shell and the like
_SHELLS = range(2**32 - 16, 2**32)
_ENTRY = re.compile(r"(?:[^\[\],\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+")
_PORTS = range(10_000, 32_749)  # neither privileged nor ephemeral; the number of ports is prime


@dataclass(frozen=True, slots=True)
class Step:
    """One task of a job step, as `srun` started it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    job: str
    """The job's id."""
    number: int
    """The number of the step in its job."""
    nodelist: str
    """The step's hosts, rank 0's first, as SLURM writes them."""

    @property
    def name(self) -> str:
        """A name that all ranks of the step share and no other step has: "7.0"."""
        return f"{self.job}.{self.number}"

    @property
    def port(self) -> int:
        """The port of the rendezvous of ranks on several hosts."""
        return port(self.job, self.number)


def port(job: str, step: int) -> int:
    """Return the port of a job step: above the privileged ports, below the ephemeral ones.
    Different steps of a job and consecutive jobs have different ports.
    """
    number = int(job) if job.isdigit() else sum(job.encode())
    return _PORTS[(number * 101 + step) % len(_PORTS)]


def step(env: Mapping[str, str]) -> Step | None:
    """Return the task that this process is. None outside of SLURM, in an interactive shell, and in
    the batch script's shell of a job that has one task.

    Raises:
        UsageError: this is a batch script's own shell in a job of several tasks, fewer tasks were
        started than were asked for, or a variable is missing or unreadable.
    """
    rank = number_of(env, RANK)
    number = number_of(env, _STEP)
    if rank is None or number in _SHELLS:
        return None
    size = number_of(env, "SLURM_STEP_NUM_TASKS") or number_of(env, SIZE)
    spread = None
    for name in _SPREAD:
        if spread is None and env.get(name):
            spread = _counts(name, env[name])
    if size is not None:
        _refuse_fewer(env, size, spread)
    if number is None and env.get("ENVIRONMENT") == "BATCH":
        _refuse_batch_script(env, size)
        return None
    if size is None:
        raise UsageError("incomplete-settings", given=f"{RANK}={rank}", lacking=SIZE)
    node = number_of(env, "SLURM_NODEID") or 0
    local_rank = number_of(env, LOCAL_RANK)
    if local_rank is None:
        raise UsageError("incomplete-settings", given=f"{RANK}={rank}", lacking=LOCAL_RANK)
    return Step(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=spread[node] if spread and node < len(spread) else size,
        node=node,
        job=env.get("SLURM_JOB_ID", "0"),
        number=number or 0,
        nodelist=env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "",
    )


def _refuse_batch_script(env: Mapping[str, str], size: int | None) -> None:
    expected = size or (number_of(env, _ASKED_PER_NODE) or 1) * _nodes(env)
    if expected > 1:
        raise UsageError("batch-script-shell", expected=expected)


def _refuse_fewer(env: Mapping[str, str], size: int, spread: list[int] | None) -> None:
    """Raise UsageError if the fullest host runs fewer tasks than --ntasks-per-node. `srun -n 1` and
    `--ntasks=1` beside it cause that.
    """
    per_node = number_of(env, _ASKED_PER_NODE)
    nodes = _nodes(env)
    fullest = max(spread) if spread else math.ceil(size / nodes)
    if per_node is not None and fullest < per_node:
        raise UsageError(
            "fewer-tasks-than-asked",
            size_name=SIZE,
            size=size,
            per_node=per_node,
            expected=per_node * nodes,
            fullest=fullest,
        )


def _nodes(env: Mapping[str, str]) -> int:
    return number_of(env, "SLURM_STEP_NUM_NODES") or number_of(env, "SLURM_NNODES") or 1


def _counts(name: str, text: str) -> list[int]:
    """Parse `2(x3),1` as 2, 2, 2, 1."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(\(x(\d+)\))?\s*", entry)
        if match is None:
            raise UsageError("slurm-list-unreadable", name=name, value=text, form="2(x3),1")
        counts += [int(match[1])] * int(match[3] or 1)
    return counts


def number_of(env: Mapping[str, str], name: str) -> int | None:
    """Return a launcher's variable as a number; None if it is unset or empty. Raises UsageError if
    it is not a whole number.
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    return whole(name, value_of(text), -math.inf)


def endpoint(step: Step) -> tuple[str, str]:
    """Return MASTER_ADDR and MASTER_PORT of a step. Raises UsageError if SLURM names no hosts."""
    if step.local_size == step.size:
        return "127.0.0.1", str(step.port)
    if not step.nodelist:
        raise UsageError(
            "rank-0-host-unknown",
            source="SLURM_STEP_NODELIST and SLURM_JOB_NODELIST",
            size=step.size,
        )
    return first_host(step.nodelist), str(step.port)


def first_host(nodelist: str) -> str:
    """Return the host of rank 0 from a SLURM `nodelist`: n03 of `n[03-04,07],b2`.

    `scontrol show hostnames` gives the same, but some containers lack it, and it costs a process in
    every rank.
    """
    first = _ENTRY.match(nodelist.lstrip(","))
    if first is None or not _ENTRY.sub("", nodelist).strip(",") == "":
        raise UsageError(
            "slurm-list-unreadable", name="nodelist", value=nodelist, form="n[01-03,07],b2"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
