"""A script under `lockstep run` finds the launcher's store where MASTER_ADDR and MASTER_PORT still
lead to it. Everywhere else, and in processes that a rank starts, torch behaves as without Lockstep.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lockstep.runtime import slurm_step
from tests.launcher.commands import python

# The sum tells which ranks have met: each has another value.
_JOIN = """
import os, time, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def own_port():
    from lockstep.runtime.slurm_step import port
    return port(str(os.getpid()), 0)

def joined(**options):
    dist.init_process_group("gloo", **options)
    total = torch.tensor([3.0 ** dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()
"""


def _run(
    folder: Path, script: str, workers: int, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(_JOIN + script)
    command = ["-m", "lockstep", "run", "--workers", str(workers), *options, "script.py"]
    return python(*command, cwd=folder, **variables)


def _written(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of stdout, without the rank before each, in a fixed order."""
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.rpartition("] ")[2] for line in done.stdout.splitlines())


METHODS = [pytest.param("spawn", marks=pytest.mark.rest), "fork"]
_BY_URL = "init_method='tcp://127.0.0.1:' + os.environ['MASTER_PORT'], rank=rank, world_size=2"


@pytest.mark.parametrize("start", ["", pytest.param("--cold", marks=pytest.mark.rest)])
def test_ranks_join_through_the_launchers_store_and_at_a_port_of_the_scripts_own(
    tmp_path: Path, start: str
) -> None:
    # no outgoing connection of this host gets them
    port, other = (slurm_step.port(str(os.getpid()), number) for number in (1, 2))
    script = f"""
import lockstep, lockstep.collectives
rank = int(os.environ["RANK"])
by_url = joined({_BY_URL})
os.environ["MASTER_ADDR"] = "localhost"
time.sleep(0.3 * (1 - rank))  # rank 1 finds what the first group has left in the store
print(rank, joined(), by_url)
os.environ["MASTER_PORT"] = "{port}"
dist.init_process_group("gloo", rank=rank, world_size=2)
store = dist.TCPStore("localhost", {port}, is_master=False)  # the script's own, and it is open
print(rank, store.num_keys() > 1)
dist.barrier()
dist.destroy_process_group()
os.environ["MASTER_PORT"] = "{other}"
with lockstep.init() as world:
    store = dist.TCPStore("127.0.0.1", {other}, is_master=False)
    tensor = torch.tensor([5.0 ** world.rank])
    lockstep.collectives.all_reduce(tensor)
    print(rank, tensor.item(), store.num_keys() > 1)
"""
    lines = _written(_run(tmp_path, script, 2, *start.split()))
    assert lines == [
        f"{rank} {line}" for rank in (0, 1) for line in ("4.0 4.0", "6.0 True", "True")
    ]


@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_each_rank_starts_have_worlds_of_their_own(tmp_path: Path, method: str) -> None:
    """They inherit nothing that would send rank 0 to a store that nobody opens."""
    script = f"""
def main(rank, ranks, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    line = os.environ["RANK"] + f" {{joined(rank=rank, world_size=ranks)}}\\n"
    os.write(1, line.encode())  # in one piece: three processes share the pipe

if __name__ == "__main__":
    mp.start_processes(main, args=(3, own_port()), nprocs=3, join=True, start_method="{method}")
"""
    assert _written(_run(tmp_path, script, 2)) == ["0 13.0"] * 3 + ["1 13.0"] * 3  # 1 + 3 + 9


@pytest.mark.parametrize("method", METHODS)
def test_such_ranks_at_the_launchers_port_hear_that_it_is_taken(
    tmp_path: Path, method: str
) -> None:
    script = f"""
def main(rank):
    joined(rank=rank, world_size=2)

if __name__ == "__main__":
    print("port", os.environ["MASTER_PORT"])
    mp.start_processes(main, nprocs=2, join=True, start_method="{method}")
"""
    done = _run(tmp_path, script, 1)
    assert done.returncode == 1
    port = done.stdout.split()[-1]
    assert "EADDRINUSE" in done.stderr
    assert f"port: {port}" in done.stderr


@pytest.mark.parametrize("start", ["", pytest.param("--cold", marks=pytest.mark.rest)])
def test_only_the_rank_itself_counts_as_launched_and_one_thread_that_was_asked_for_is_one(
    tmp_path: Path, start: str
) -> None:
    script = """
import subprocess, sys

ask = "import torch.distributed as dist; print(dist.is_torchelastic_launched())"
child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True).stdout.strip()
with mp.get_context("fork").Pool(1) as pool:
    forked = pool.apply(dist.is_torchelastic_launched)
torchruns = [name for name in os.environ if name.startswith("TORCHELASTIC")]
import lockstep
with lockstep.init():
    print(torch.get_num_threads(), dist.is_torchelastic_launched(), child, forked, torchruns)
"""
    done = _run(tmp_path, script, 1, *start.split(), OMP_NUM_THREADS="1")
    assert _written(done) == ["1 True False False []"]
