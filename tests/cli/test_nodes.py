"""A fixed set of nodes, each a network namespace that runs the command: --nodes, --node-rank and
--rdzv-endpoint, or PET_* variables.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.training.train import train
from tests.ending import end, kill
from tests.networks import Host, Started, hosts
from tests.runtime.variables import variables
from tests.training import toy

pytestmark = pytest.mark.rest

TASK = """
import os, time
from pathlib import Path
from tests.training import toy

class Net(toy.Net):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == 6 and "GATED" in os.environ:
            Path(f"at-{os.environ['RANK']}").touch()
            while not Path("go").exists():
                time.sleep(0.02)
        return super().forward(x)

def task():
    return toy.task(name=None, model=Net, epochs=4)
"""
PORT = 29411


@pytest.fixture(scope="module")
def network() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture
def pair(network: list[Host]) -> Iterator[list[Host]]:
    """Two nodes, in which nothing is left when their commands have ended."""
    yield network
    left = {host.name: host.wait_until_empty(30) for host in network}
    for host in network:
        kill(host.processes())  # only a failed test leaves one
        for started in host.started:
            end(started.process)
        host.started.clear()
    assert left == {host.name: [] for host in network}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


def options(rank: int) -> list[str]:
    return ["--nodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", f"anna:{PORT}"]


def pet(rank: int, workers: int = 1) -> dict[str, str]:
    """What Kubeflow's TrainJob sets."""
    text = f"PET_NNODES=2 PET_NPROC_PER_NODE={workers} PET_NODE_RANK={rank}"
    return variables(f"{text} PET_MASTER_ADDR=anna PET_MASTER_PORT={PORT}")


def wait_for(file: Path, *running: Started) -> None:
    until = time.monotonic() + 150
    while not file.exists():
        ended = [started.end() for started in running if started.process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < until, f"{file.name} has not come"
        time.sleep(0.02)


def last(text: str) -> str:
    return text.splitlines()[-1]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of one process on one host."""
    return train(toy.task(epochs=4), exact=True).sha256


def test_two_nodes_train_the_bits_of_one_and_stop_together_saved(
    pair: list[Host], folder: Path, undisturbed: str
) -> None:
    """And resume as the variables of a TrainJob say."""
    command = ["train", "my_task.py", "--exact", "--workers", "4", "--run", "run"]
    anna, bert = (
        host.lockstep(*command, *options(rank), cwd=folder, GATED="1")
        for rank, host in enumerate(pair)
    )
    for rank in range(3):  # with three micro-batches a step the fourth rank has no forward
        wait_for(folder / f"at-{rank}", anna, bert)
    assert [host.listeners() for host in pair] == [{"10.78.0.1"}, {"10.78.0.2"}]
    bert.process.send_signal(signal.SIGTERM)
    (folder / "go").touch()
    (code, _, err), (other_code, _, other_err) = anna.end(), bert.end()
    assert (code, other_code) == (75, 75), err + other_err
    assert re.search(r"^stopped after step \d+ of 16, saved: ", err, re.MULTILINE)
    anna, bert = (
        host.lockstep(*command, cwd=folder, **pet(rank, 2)) for rank, host in enumerate(pair)
    )
    (code, out, err), (other_code, other_out, other_err) = anna.end(), bert.end()
    assert (code, other_code, other_out) == (0, 0, ""), err + other_err
    assert "resumed from step " in err
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    assert "16 steps, 4 workers, replicated, " in out
    assert json.loads((folder / "run" / "settings.json").read_text())["workers"] == 4


@pytest.mark.parametrize("here", [0, 1])
def test_a_node_that_does_not_come_is_named(pair: list[Host], folder: Path, here: int) -> None:
    started = pair[here].lockstep("train", "my_task.py", "--timeout", "3", cwd=folder, **pet(here))
    code, out, err = started.end()
    assert (code != 0, out) == (True, "")
    assert ("rank 1 of 2 did not call lockstep.init()" if here == 0 else f"anna:{PORT}") in last(
        err
    ), err


def test_a_failure_is_the_last_word_where_it_happened_and_the_other_node_ends(
    pair: list[Host], folder: Path
) -> None:
    (folder / "script.py").write_text(
        "import lockstep\nworld = lockstep.init()\nif world.rank == 3:\n    raise"
        " ValueError('boom')\nworld.barrier()\n"
    )
    started = [
        host.lockstep(
            "run", "--workers", "4", *options(rank), "--timeout", "20", "script.py", cwd=folder
        )
        for rank, host in enumerate(pair)
    ]
    (code, _, err), (other_code, _, other_err) = (each.end() for each in started)
    assert (code != 0, other_code) == (True, 1), err
    assert last(other_err).startswith("rank 3 (pid ")
    assert last(other_err).endswith("failed: ValueError: boom")


def test_node_0_must_be_where_the_endpoint_is(pair: list[Host], folder: Path) -> None:
    (folder / "script.py").touch()
    code, _, err = pair[1].lockstep("run", *options(0), "script.py", cwd=folder).end()
    assert (code, err.count("\n")) == (1, 1)
    assert f"10.78.0.1:{PORT} (" in err
    assert "[store-not-started]" in err
