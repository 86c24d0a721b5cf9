"""`lockstep.launch`: results by rank, the cause of a failure with its traceback, and nobody left
over.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import LaunchTimeout, WorkerFailed
from lockstep.launcher.launch import launch, start_ranks
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.ending import wait_gone
from tests.launcher.commands import python
from tests.refused import refused


def _sum_over_ranks(factor: float, *, offset: float = 0.0) -> tuple[int, float]:
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return dist.get_rank(), value.item() * factor + offset


def _with_lockstep() -> tuple[int, int, bool]:
    world = lockstep.init()  # left open: launch closes it
    return world.rank, world.size, dist.is_torchelastic_launched()


def test_results_come_back_by_rank_from_plain_torch_and_from_a_world_left_open() -> None:
    results = launch(_sum_over_ranks, workers=3, args=(10.0,), kwargs={"offset": 1.0})
    assert results == [(0, 31.0), (1, 31.0), (2, 31.0)]
    assert lockstep.launch(_with_lockstep, workers=2) == [(0, 2, False), (1, 2, False)]


def _uses_what_it_gets(
    world: World, model: torch.nn.Linear, queue: Queue[int]
) -> tuple[float, list[str], str]:
    world.barrier()
    with torch.no_grad():
        model.weight += 1
    world.barrier()
    queue.put(world.rank)
    queue.close()
    queue.join_thread()
    names = ("LOCKSTEP_TEST", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    method = str(multiprocessing.get_start_method())
    return model.weight.item(), [os.environ[name] for name in names], method


def test_tensors_are_copied_queues_handed_over_and_the_environment_reaches_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank starts processes as its caller does, and not as it was started itself: loader workers
    that are spawned take seconds.
    """
    monkeypatch.setenv("LOCKSTEP_TEST", "here")
    model, queue = torch.nn.Linear(1, 1), multiprocessing.get_context("spawn").Queue()
    before, method = model.weight.item(), multiprocessing.get_start_method()
    assert run_ranks(_uses_what_it_gets, 3, args=(model, queue)) == [
        (before + 1, ["here", str(rank), str(rank), "3"], method) for rank in range(3)
    ]
    assert model.weight.item() == before
    assert {queue.get(timeout=20) for _ in range(3)} == {0, 1, 2}
    queue.close()
    queue.join_thread()


# -- failures ------------------------------------------------------------------------------------


def _cut_connections() -> None:
    """What the others see when a process dies, while this one lives on."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            with socket.fromfd(connection.fd, connection.family, connection.type) as end:
                end.shutdown(socket.SHUT_RDWR)


def _unwind_slowly(world: World) -> None:
    if world.rank == 1:
        try:
            raise ValueError("the true cause")
        finally:  # the others see the lost connection long before this rank can say why
            _cut_connections()
            time.sleep(0.3)
    dist.all_reduce(torch.ones(3))


def _killed(world: World) -> None:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.group.all_reduce(torch.ones(3)).wait()


def _leaves(world: World) -> None:
    if world.rank == 1:
        os._exit(0)
    world.group.all_reduce(torch.ones(3)).wait()


def _returns_early(world: World) -> None:
    if world.rank == 0:
        world.group.all_reduce(torch.ones(3)).wait()
    else:
        dist.destroy_process_group()
        world._open.clear()  # as a rank that never opened one


def _generator(world: World) -> Iterator[int]:
    return (number for number in range(world.rank))


def test_the_cause_is_told_from_its_consequences(monkeypatch: pytest.MonkeyPatch) -> None:
    # however loaded the machine is: what a rank has to say comes in time
    monkeypatch.setattr("lockstep.launcher.engine._SETTLE_SECONDS", 300.0)
    with pytest.raises(WorkerFailed, match=r"rank 1 \(pid \d+, .*\) failed: .* true cause") as slow:
        run_ranks(_unwind_slowly, 3)
    assert slow.value.rank == 1
    assert slow.value.traceback.splitlines()[1].startswith(f'  File "{__file__}"')
    assert slow.value.traceback in str(slow.value) + "\n"
    same = "rank 1 had finished before that: do all ranks take the same number of steps"
    functions: dict[Callable[[World], None], str] = {
        _killed: r"rank 1 .* was killed by signal 9 \(SIGKILL\)",
        _leaves: "rank 1 .* exited with code 0: before it returned a result",
        _returns_early: same,
        _generator: r"returned a generator, which cannot be sent back.*\[result-not-sendable\]",
    }
    for function, sentence in functions.items():
        with pytest.raises(WorkerFailed, match=sentence):
            run_ranks(function, 2)


def _leave_a_name_behind() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    Path("/dev/shm", f"torch_{child}_1_0").touch()  # as torch's loader workers do, for a moment
    raise ValueError(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
def test_what_a_killed_process_of_a_rank_has_named_in_shared_memory_is_removed() -> None:
    with pytest.raises(WorkerFailed) as caught:
        launch(_leave_a_name_behind, 1)
    child = caught.value.sentence.splitlines()[0].rpartition(" ")[2]
    assert not Path("/dev/shm", f"torch_{child}_1_0").exists()


def _hang_on_one(world: World, directory: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pids = Path(directory, f"{world.rank}.writing")
    pids.write_text(f"{os.getpid()} {child.pid}")
    pids.rename(pids.with_suffix(".pids"))
    if world.rank == 1:
        signal.pause()
    world.barrier()


def test_a_timeout_names_the_ranks_that_still_run_and_ends_them_with_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """An hour later as soon as both ranks are where they hang."""

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + 3600 * (len(list(tmp_path.glob("*.pids"))) == 2)

    monkeypatch.setattr("lockstep.launcher.launch.time", Clock)
    with refused(
        "launch-timeout", LaunchTimeout, who="ranks 0 and 1", size=2, seconds=1800, running=[0, 1]
    ) as caught:
        run_ranks(_hang_on_one, 2, args=(str(tmp_path),), timeout=timedelta(minutes=30))
    assert isinstance(caught.value, LaunchTimeout)
    assert caught.value.running == (0, 1)
    wait_gone([int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()])


def _leaves_a_thread() -> str:
    threading.Thread(target=time.sleep, args=(7.0,), name="uploader").start()
    return "done"


@pytest.mark.rest
def test_a_rank_that_waits_at_its_end_says_for_which_thread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(_leaves_a_thread, 1) == ["done"]
    report = capsys.readouterr().err
    assert "rank 0" in report
    assert "its process does not end: it waits for the thread 'uploader'" in report


def test_what_cannot_be_launched_is_refused() -> None:
    for workers in (0, -1, 1.5, True):
        with refused("wrong-value", name="workers", value=workers):
            launch(_with_lockstep, workers=workers)  # type: ignore[arg-type]
    with refused("function-not-importable") as caught:
        launch(lambda: 1)
    assert caught.value.values["name"].endswith("<lambda>")
    with refused("call-not-sendable"):
        launch(print, args=((number for number in range(3)),))


def test_ranks_with_variables_of_their_own_are_fresh_interpreters() -> None:
    seeds = start_ranks(
        _hash_seed, 2, (), {}, timeout=None, variables=lambda rank: {"PYTHONHASHSEED": str(rank)}
    )
    assert seeds == [("0", 0), ("1", 1)]


def _hash_seed() -> tuple[str, int]:
    return os.environ["PYTHONHASHSEED"], int(sys.flags.hash_randomization)


# -- from scripts and notebooks ------------------------------------------------------------------


def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import lockstep\nlockstep.launch(print, workers=2)")
    done = python(str(tmp_path / "script.py"))
    assert 'Put the call under `if __name__ == "__main__":`' in done.stderr
    assert done.stderr.count("Traceback") == 1


OWN_FUNCTION = """
import os, lockstep
from dataclasses import dataclass
@dataclass
class Result:
    rank: str
def rank():
    print("one", "line")
    return Result(os.environ["RANK"])
if __name__ == "__main__":
    print(lockstep.launch(rank, 2))
"""


def test_a_function_of_the_script_itself_can_be_launched_and_prints_whole_lines(
    tmp_path: Path,
) -> None:
    """Ranks share what they print to, such as a notebook's cell, and an unbuffered Python writes a
    line in pieces. A pipe in packet mode keeps pieces apart.
    """
    (tmp_path / "script.py").write_text(OWN_FUNCTION)
    reading, writing = os.pipe2(os.O_DIRECT)
    command = [sys.executable, "-u", "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, check=True
    )
    os.close(writing)
    assert [os.read(reading, 100) for _ in range(2)] == [b"one line\n"] * 2
    with os.fdopen(reading) as rest:
        assert rest.read() == "[Result(rank='0'), Result(rank='1')]\n"
    assert done.stderr == ""


NOTEBOOK = """
import lockstep, torch
class Result:
    def __init__(self, rank, total): self.rank, self.total = rank, total
def train(values):
    with lockstep.init() as world:
        return Result(world.rank, lockstep.collectives.all_reduce(values * (world.rank + 1)).sum().item())
results = lockstep.launch(train, 2, (torch.ones(2),))
print([(result.rank, result.total) for result in results if isinstance(result, Result)])
"""


CELL = """
import linecache
source = "def fails():\\n    return 1 / 0  # of a cell\\nlockstep.launch(fails, 1)\\n"
linecache.cache["/tmp/ipykernel_1/2.py"] = len(source), None, source.splitlines(True), "/tmp/ipykernel_1/2.py"  # as IPython does
exec(compile(source, "/tmp/ipykernel_1/2.py", "exec"))
"""


def test_a_function_of_a_notebook_travels_by_value_and_its_traceback_shows_the_cells_lines() -> (
    None
):
    done = python("-", read=NOTEBOOK + CELL)
    assert done.stdout == "[(0, 6.0), (1, 6.0)]\n", done.stderr
    ranks_own = done.stderr.partition("lockstep.errors.WorkerFailed")[2]
    line = '  File "/tmp/ipykernel_1/2.py", line 2, in fails\n    return 1 / 0  # of a cell\n'
    assert line in ranks_own, done.stderr
