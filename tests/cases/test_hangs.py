"""Twelve ways in which published scripts of plain torch.distributed or DDP hang, and what `lockstep
run` says of each: who waits where, who is elsewhere, and at which line of the script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.launcher.stalls import Watcher
from lockstep.runtime import status

START = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.full((3,), float(rank))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """A script, and what is said of it: {NAME} is the number of the line that ends with # NAME."""

    script: str
    says: str
    workers: int = 2
    code: int = 76


HANGS = {
    "a branch around a collective": Hang(
        script="""
if rank == 0:
    dist.all_reduce(x)  # LOSS
dist.broadcast(torch.ones(5), src=0)  # WEIGHTS
""",
        says=r"the ranks wait for each other: #1 is not the same. It is in rank 0 all_reduce sum"
        r" f32\[3\] at script.py:{LOSS}; in rank 1 broadcast f32\[5\] from rank 0 at"
        r" script.py:{WEIGHTS}\.",
    ),
    "uneven batches": Hang(
        script="""
model = DistributedDataParallel(torch.nn.Linear(3, 2))
for batch in range(4 - rank):
    model(x).sum().backward()  # BACKWARD
if rank == 1:
    time.sleep(1000)  # SLEEP
""",
        says=r"rank 0 waits in all_reduce f32\[8\] in a backward at script.py:{BACKWARD}\. Rank 1"
        r" is not there: in a system call \(sleep\), script.py:{SLEEP} <module>, for \d+ s\.",
    ),
    "a barrier of rank 0": Hang(
        workers=3,
        script="""
if rank == 0:
    dist.barrier()  # BARRIER
dist.all_reduce(x)  # NEXT
""",
        says=r"the ranks wait for each other: #1 is not the same. It is in rank 0 barrier at"
        r" script.py:{BARRIER}; in ranks 1 and 2 all_reduce sum f32\[3\] at script.py:{NEXT}\.",
    ),
    "a loader that sleeps": Hang(
        script="""
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if rank == 1 and index == 5:
            time.sleep(1000)  # SLEEP
        return torch.ones(3)

model = DistributedDataParallel(torch.nn.Linear(3, 2))
for batch in torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1):
    model(batch).sum().backward()  # BACKWARD
""",
        says=r"rank 0 waits in all_reduce f32\[8\] in a backward at script.py:{BACKWARD}\. Rank 1"
        r" is not there: in the loader, script.py:{SLEEP} __getitem__ \(loader worker, pid \d+\)",
    ),
    "a rank that is stopped": Hang(
        workers=3,
        script="""
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
work = dist.all_reduce(x, async_op=True)  # REDUCE
work.wait()
""",
        says=r"ranks 0 and 2 wait in #2 \(all_reduce sum f32\[3\] at script.py:{REDUCE}\)\. Rank 1"
        r" never issued it: stopped \(SIGSTOP or a debugger\), for \d+ s\.",
    ),
    "two collectives in another order": Hang(
        script="""
def metrics():
    dist.all_gather([torch.empty(3) for _ in range(size)], x)  # GATHER

def weights():
    dist.broadcast(x, src=0)  # BROADCAST

for each in (metrics, weights) if rank == 0 else (weights, metrics):
    each()
""",
        says=r"the ranks wait for each other: #1 is not the same. It is in rank 0 all_gather"
        r" f32\[3\] at script.py:{GATHER}; in rank 1 broadcast f32\[3\] from rank 0 at"
        r" script.py:{BROADCAST}\.",
    ),
    "collectives of another kind": Hang(
        script="""
dist.all_reduce(x)
if rank == 0:
    dist.all_gather_object([None] * size, "best")  # GATHER
else:
    dist.barrier()  # BARRIER
""",
        says=r"the ranks wait for each other: #2 is not the same. It is in rank 0"
        r" all_gather_object at script.py:{GATHER}; in rank 1 barrier at script.py:{BARRIER}\.",
    ),
    "a recv without a send": Hang(
        workers=3,
        script="""
if rank == 0:
    dist.recv(x, src=2)  # RECV
dist.barrier()  # BARRIER
""",
        says=r"the ranks wait for each other in different places: rank 0 in recv f32\[3\] from rank 2 at"
        r" script.py:{RECV}; ranks 1 and 2 in #1 \(barrier at script.py:{BARRIER}\)\.",
    ),
    "a rank that leaves early": Hang(
        workers=3,
        script="""
if rank == 1:
    sys.exit(0)
dist.new_group(backend="gloo")  # GROUP
""",
        says=r"ranks 0 and 2 wait in #1 \(new_group at script.py:{GROUP}\)\. Rank 1 never issued it:"
        r" its process has ended, with exit code 0\.",
    ),
    "an exception that is swallowed": Hang(
        script="""
model = DistributedDataParallel(torch.nn.Linear(3, 2))
for batch in range(3):
    try:
        if rank == 1 and batch == 1:
            raise ValueError("a bad sample")
        model(x).sum().backward()  # BACKWARD
    except ValueError:
        pass
dist.barrier()  # METRICS
""",
        says=r"the ranks wait for each other in different places: rank 0 in all_reduce f32\[8\] in a"
        r" backward at script.py:{BACKWARD}; rank 1 in #1 \(barrier at"
        r" script.py:{METRICS}\)\.",
    ),
    "parameters that one rank does not use": Hang(
        script="""
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.one(x) if rank == 1 else self.one(x) + self.two(x)

model = DistributedDataParallel(Net(), find_unused_parameters=False)
model(x).sum().backward()  # BACKWARD
dist.barrier()  # BARRIER
""",
        says=r"the ranks wait for each other in different places: rank 0 in all_reduce f32\[16\] in a"
        r" backward at script.py:{BACKWARD}; rank 1 in #1 \(barrier at script.py:{BARRIER}\)\.",
    ),
    "a group that some ranks open": Hang(
        workers=3,
        script="""
if rank == 0:
    dist.new_group([0, 1])  # GROUP
dist.all_reduce(x)  # REDUCE
""",
        says=r"the ranks wait for each other: #1 is not the same. It is in rank 0 new_group at"
        r" script.py:{GROUP}; in ranks 1 and 2 all_reduce sum f32\[3\] at script.py:{REDUCE}\.",
    ),
}


def ended(name: str, folder: Path) -> tuple[int, str]:
    """Exit code and stderr."""
    folder.mkdir()
    (folder / "script.py").write_text(START + HANGS[name].script)
    command = [sys.executable, "-m", "lockstep", "run", "--stall-after", "2"]
    done = subprocess.run(
        [*command, "--workers", str(HANGS[name].workers), "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stderr


def sentence(hang: Hang) -> str:
    """As a pattern, with the numbers of the script's lines."""
    says = hang.says
    for number, line in enumerate((START + hang.script).splitlines(), 1):
        if mark := re.search(r"# ([A-Z]+)$", line):
            says = says.replace(f"{{{mark[1]}}}", str(number))
    return rf"^STALL \d+ s: {says}"


FAST = ["a branch around a collective", "parameters that one rank does not use"]
REST = [name for name in HANGS if name not in FAST]


@pytest.mark.parametrize(
    "names",
    [FAST, *(pytest.param(REST[first::3], marks=pytest.mark.rest) for first in range(3))],
    ids=", ".join,
)
def test_a_plain_script_that_hangs_is_named_with_rank_and_line(
    names: list[str], tmp_path: Path
) -> None:
    """Side by side: nearly all of their time is waiting."""
    with ThreadPoolExecutor(len(names)) as pool:
        found = dict(
            zip(names, pool.map(lambda name: ended(name, tmp_path / name), names), strict=True)
        )
    for name, (code, said) in found.items():
        if code != HANGS[name].code or not re.search(sentence(HANGS[name]), said, re.MULTILINE):
            pytest.fail(f"{name}: exit code {code}, and it says\n{said}", pytrace=False)


@pytest.mark.parametrize("noted", [True, False])
def test_a_wait_in_native_code_is_said_though_it_is_noted_late(noted: bool, tmp_path: Path) -> None:
    """A thread of the rank looks for it twice a second, and later on a busy host. A rank whose
    thread never looks is called absent, after twice the time.
    """
    first, second = (status.Page(status.file_of(tmp_path, rank)) for rank in (0, 1))
    first.call(b"init_process_group at a.py:1", status.EVERYBODY, False)
    first.called()
    first.looked()
    second.call(b"barrier at a.py:9", status.EVERYBODY, True)
    clock = [time.monotonic()]
    watcher, pids = Watcher(tmp_path, 10, lambda: clock[-1]), {0: os.getpid(), 1: os.getpid()}
    assert watcher.look(pids) is None
    clock.append(clock[0] + 11)
    assert watcher.look(pids) is None
    if noted:
        first.in_native(b"all_reduce f32[8] in a backward at a.py:5")
    clock.append(clock[0] + (12 if noted else 21))
    stall = watcher.look(pids)
    assert stall is not None
    both = "rank 0 in all_reduce f32[8] in a backward at a.py:5; rank 1 in #1"
    assert (both in stall.message) == noted
    assert ("Rank 0 never issued it" in stall.message) == (not noted)
