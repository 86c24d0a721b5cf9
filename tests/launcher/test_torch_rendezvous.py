"""A script under `lockstep run` finds the launcher's store where MASTER_ADDR and MASTER_PORT still
lead to it. Everywhere else, and in processes that a rank starts, torch behaves as without Lockstep.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import lockstep
from lockstep.runtime import slurm_step
from tests.launcher.commands import python

# The sum tells which ranks have met: each has another value.
_JOIN = """
import os, torch
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


_BY_URL = "init_method='tcp://127.0.0.1:' + os.environ['MASTER_PORT'], rank=rank, world_size=2"


@pytest.mark.parametrize(
    ("address", "options", "start"),
    [
        ("localhost", "", ""),
        pytest.param("127.0.0.1", "", "--cold", marks=pytest.mark.rest),
        ("127.0.0.1", _BY_URL, ""),
    ],
)
def test_ranks_join_through_the_launchers_store(
    tmp_path: Path, address: str, options: str, start: str
) -> None:
    script = f"""
rank = int(os.environ["RANK"])
os.environ["MASTER_ADDR"] = "{address}"
print(rank, joined({options}))
"""
    assert _written(_run(tmp_path, script, 2, *start.split())) == ["0 4.0", "1 4.0"]


def test_a_script_that_sets_its_own_port_gets_a_store_there(tmp_path: Path) -> None:
    port = slurm_step.port(str(os.getpid()), 1)  # no outgoing connection of this host gets it
    script = f"""
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{port}"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
store = dist.TCPStore("localhost", {port}, is_master=False)
print(dist.get_rank(), store.num_keys() > 1)
dist.barrier()
"""
    assert _written(_run(tmp_path, script, 2)) == ["0 True", "1 True"]


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.rest), "fork"])
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


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.rest), "fork"])
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


def _is_launched() -> bool:
    import torch.distributed as dist

    return dist.is_torchelastic_launched()


def test_ranks_of_a_function_do_not_count_as_launched() -> None:
    assert lockstep.launch(_is_launched, workers=2) == [False, False]


def test_init_takes_an_address_that_the_script_sets(tmp_path: Path) -> None:
    port = slurm_step.port(str(os.getpid()), 2)
    script = f"""
import lockstep, lockstep.collectives
os.environ["MASTER_PORT"] = "{port}"
with lockstep.init() as world:
    store = dist.TCPStore("127.0.0.1", {port}, is_master=False)  # the script's own, and it is open
    tensor = torch.tensor([5.0 ** world.rank])
    lockstep.collectives.all_reduce(tensor)
    print(world.rank, tensor.item(), store.num_keys() > 1)
"""
    assert _written(_run(tmp_path, script, 2)) == ["0 6.0 True", "1 6.0 True"]
