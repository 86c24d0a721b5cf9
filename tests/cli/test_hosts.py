"""`lockstep run` and `lockstep train` over hosts: network namespaces, with an agent in each."""

from __future__ import annotations

import json
import re
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.training.train import train
from tests.ending import end, kill
from tests.networks import Host, Started, hosts
from tests.training import toy

pytestmark = pytest.mark.kills

# Trains on when the test says so: the ranks of generation N, which counts the files that rank 0 has left, wait for go-N in their sixth step.
TASK = """
import os, time
from pathlib import Path
from tests.training import toy

if os.environ["RANK"] == "0":
    Path(f"begun-{len(list(Path().glob('begun-*'))) + 1}").touch()

class Net(toy.Net):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == 6 and "GATED" in os.environ:
            number = len(list(Path().glob("begun-*")))
            Path(f"at-{number}-{os.environ['RANK']}").touch()
            while not Path(f"go-{number}").exists():
                time.sleep(0.02)
        return super().forward(x)

def task():
    return toy.task(name=None, model=Net, epochs=4)
"""
# Ranks that need no torch start fast.
WAITING = "import os, signal\nfrom pathlib import Path\nPath(f\"here-{os.environ['RANK']}\").touch()\nsignal.pause()\n"


@pytest.fixture(scope="module")
def network() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


@pytest.fixture
def pair(network: list[Host]) -> Iterator[list[Host]]:
    """Two hosts, in which nothing is left 5 s after their agents have ended."""
    yield network
    left = {host.name: host.wait_until_empty(30) for host in network}
    for host in network:
        host.mend()
        kill(host.processes())  # only a failed test leaves one
        for started in host.started:
            end(started.process)
        host.started.clear()
    assert left == {host.name: [] for host in network}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(secrets.token_hex(32))
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


def options(nodes: str, *more: str, meet: str = "anna") -> list[str]:
    return ["--nodes", nodes, "--meet", meet, "--token", "token", *more]


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


def test_two_hosts_train_the_bits_of_one_and_listen_on_their_own_network_only(pair: list[Host], folder: Path, undisturbed: str) -> None:
    command = ["train", "my_task.py", "--exact", "--workers", "4", "--run", "run"]
    anna, bert = (host.lockstep(*command, *options("2"), "--node-rank", str(rank), cwd=folder, GATED="1") for rank, host in enumerate(pair))
    for rank in range(3):  # with three micro-batches a step the fourth rank has no forward
        wait_for(folder / f"at-1-{rank}", anna, bert)
    assert [host.listeners() for host in pair] == [{"10.78.0.1"}, {"10.78.0.2"}]
    (folder / "go-1").touch()
    (code, out, err), (other_code, other_out, other_err) = anna.end(), bert.end()
    assert (code, other_code, other_out) == (0, 0, ""), err + other_err
    assert "16 steps, 4 workers, replicated, " in out
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    assert "meeting of 2 hosts on 10.78.0.1:29400 (wire0), job " in err
    seats = "(anna (10.78.0.1), bert (10.78.0.2))"
    assert f"host 0 of 2 {seats}: ranks 0 and 1 of 4 here, on 10.78.0.1 (wire0)" in err
    assert f"host 1 of 2 {seats}: ranks 2 and 3 of 4 here, on 10.78.0.2 (wire0)" in other_err
    assert json.loads((folder / "run" / "settings.json").read_text())["workers"] == 4


def test_data_over_hosts_and_layers_inside_them(pair: list[Host], folder: Path) -> None:
    small = [word for each in ("train_bytes=3000", "eval_bytes=600", "width=16", "depth=2", "length=8") for word in ("--set", each)]
    command = ["train", "text", "--mesh", "data=2,pipeline=2", "--workers", "4", "--steps", "3", "--run", "run", *small]
    anna, bert = (host.lockstep(*command, *options("2"), "--node-rank", str(rank), cwd=folder) for rank, host in enumerate(pair))
    (code, out, err), (other_code, other_out, other_err) = anna.end(), bert.end()
    assert (code, other_code, other_out) == (0, 0, ""), err + other_err
    assert "3 steps, 4 workers, mesh data=2,pipeline=2 1f1b, replicated, " in out
    said = json.loads((folder / "run" / "mesh.json").read_text())["ranks"]
    assert [(each["node"], each["data"], each["pipeline"]) for each in said] == [(0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)]


def test_a_killed_agents_host_is_done_without_and_taken_in_again_at_a_checkpoint(pair: list[Host], folder: Path, undisturbed: str) -> None:
    command = ["train", "my_task.py", "--exact", "--workers-per-node", "2", "--run", "run", "--checkpoint-every", "2", *options("1:2")]
    anna = pair[0].lockstep(*command, "--node-rank", "0", cwd=folder, GATED="1")
    bert = pair[1].lockstep(*command, "--node-rank", "1", cwd=folder, GATED="1")
    wait_for(folder / "at-1-0", anna, bert)
    pair[1].agent().kill()
    wait_for(folder / "at-2-0", anna)
    again = pair[1].lockstep(*command, "--node-rank", "1", cwd=folder, GATED="1")
    wait_for(folder / "run" / "wanted", anna, again)
    for number in (2, 3):
        (folder / f"go-{number}").touch()
    (code, out, err), (other_code, other_out, other_err) = anna.end(), again.end()
    assert (code, other_code, other_out) == (0, 0, ""), err + other_err
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    assert (
        "host bert (10.78.0.2) has gone: its agent ended without a word; with it went ranks 2 and 3 of 4; going on with 1 host and 2 workers "
        "from the newest checkpoint (restart 1 of 3)" in err
    )
    assert "going on with 2 hosts and 4 workers" in err
    assert "resumed from step" in err


def test_where_hosts_are_fixed_a_killed_agent_ends_the_run_with_its_name(pair: list[Host], folder: Path) -> None:
    (folder / "script.py").write_text(WAITING)
    anna, bert = (host.lockstep("run", "--workers", "4", *options("2"), "script.py", cwd=folder) for host in pair)
    for rank in range(4):
        wait_for(folder / f"here-{rank}", anna, bert)
    pair[1].agent().kill()
    assert pair[1].wait_until_empty(5) == []
    code, _, err = anna.end()
    assert (code, last(err).partition("; with it went ranks ")[0]) == (1, "host bert (10.78.0.2) has gone: its agent ended without a word")


def test_one_agent_that_is_asked_stops_all_hosts_saved_and_the_same_command_goes_on(
    pair: list[Host], folder: Path, undisturbed: str
) -> None:
    command = ["train", "my_task.py", "--exact", "--workers", "4", "--run", "run", *options("2")]
    anna, bert = (host.lockstep(*command, "--node-rank", str(rank), cwd=folder, GATED="1") for rank, host in enumerate(pair))
    for rank in range(3):
        wait_for(folder / f"at-1-{rank}", anna, bert)
    bert.process.send_signal(signal.SIGTERM)
    (folder / "go-1").touch()
    (code, _, err), (other_code, _, other_err) = anna.end(), bert.end()
    assert (code, other_code) == (75, 75), err + other_err
    assert last(err) == last(other_err) == "stopped as asked; all ranks of all hosts have ended"
    assert re.search(r"^stopped as asked after step \d+ of 16, saved: the same command with --run \S+ goes on$", err, re.MULTILINE)
    anna, bert = (host.lockstep(*command, "--node-rank", str(rank), cwd=folder) for rank, host in enumerate(pair))
    (code, out, err), (other_code, _, _) = anna.end(), bert.end()
    assert (code, other_code) == (0, 0), err
    assert "resumed from step " in err
    assert out.endswith(f" | weights sha256 {undisturbed}\n")


SLEEPER = """
import time
import torch
import lockstep

world = lockstep.init()

def read_shard():
    time.sleep(1000)

for step in range(5):
    if world.rank == 3 and step == 4:
        read_shard()
    world.group.all_reduce(torch.ones(3)).wait()
"""


def test_a_rank_that_hangs_is_named_on_every_host_with_its_own_and_its_line(pair: list[Host], folder: Path) -> None:
    (folder / "script.py").write_text(SLEEPER)
    command = ["run", "--workers", "4", "--stall-after", "3", *options("2")]
    started = [host.lockstep(*command, "--node-rank", str(rank), "script.py", cwd=folder) for rank, host in enumerate(pair)]
    ended = [each.end() for each in started]
    assert [code for code, _, _ in ended] == [76, 76], ended
    for _, _, err in ended:
        assert re.search(r"^STALL \d+ s: ranks 0, 1 and 2 wait in #5 \(.*\), step 0\. ", last(err)), err
        assert "Rank 3 never issued it: starting, script.py:9 read_shard, for" in last(err)
        assert "Rank 3 is on bert (10.78.0.2)." in last(err)
    assert 'script.py", line 9, in read_shard' in ended[0][2]


def test_the_same_failure_is_the_last_word_on_every_host(pair: list[Host], folder: Path) -> None:
    text = "import os\nif os.environ['RANK'] == '3':\n    raise SystemExit(7) if 'QUIET' in os.environ else ValueError('boom')\n" + WAITING
    (folder / "script.py").write_text(text)
    started = [
        host.lockstep("run", "--workers", "4", *options("2"), "--node-rank", str(rank), "script.py", cwd=folder)
        for rank, host in enumerate(pair)
    ]
    (code, _, err), (other_code, _, other_err) = (each.end() for each in started)
    assert (code, other_code) == (1, 1)
    assert err.splitlines()[-4:] == other_err.splitlines()[-4:]
    assert last(err).startswith("rank 3 (pid ")
    assert re.fullmatch(r"rank 3 \(pid \d+, bert \(10.78.0.2\), log \S+\) failed: ValueError: boom", last(err))
    assert "raise SystemExit(7)" in err


def test_a_network_that_goes_away_is_noticed_on_both_sides(pair: list[Host], folder: Path) -> None:
    (folder / "script.py").write_text(WAITING)
    anna, bert = (host.lockstep("run", "--workers-per-node", "1", *options("2"), "script.py", cwd=folder) for host in pair)
    for rank in range(2):
        wait_for(folder / f"here-{rank}", anna, bert)
    pair[1].cut()
    (code, _, err), (other_code, _, other_err) = anna.end(), bert.end()
    assert (code, other_code) == (1, 1)
    assert last(err).startswith("host bert (10.78.0.2) has gone: nothing was heard of its agent for 8 s; with it went rank ")
    assert last(other_err) == (
        "bert (10.78.0.2): the meeting of the hosts at 10.78.0.1:29400 has not been heard for 8 s: is the network gone?; all ranks of this host have ended"
    )


def test_the_first_host_may_come_back_too(pair: list[Host], folder: Path) -> None:
    (folder / "script.py").write_text(
        "import os, time\nfrom pathlib import Path\nname = Path(f\"here-{os.environ['RANK']}-{os.environ['WORLD_SIZE']}\")\n"
        "again = name.exists()\nname.touch()\nwhile not again: time.sleep(0.05)\n"
    )
    command = ["run", "--workers-per-node", "1", *options("1:2"), "script.py"]
    anna, bert = (host.lockstep(*command, cwd=folder) for host in pair)
    for rank in range(2):
        wait_for(folder / f"here-{rank}-2", anna, bert)
    pair[0].agent().kill()
    again = pair[0].lockstep(*command, cwd=folder)
    (code, _, err), (other_code, _, other_err) = again.end(), bert.end()
    assert (code, other_code) == (0, 0), err + other_err
    assert (
        "the meeting of the hosts at 10.78.0.1:29400 has closed the connection: its agent has ended; waiting up to 300 s for it"
        in other_err
    )


def test_hosts_that_were_given_different_commands(pair: list[Host], folder: Path) -> None:
    (folder / "script.py").write_text(WAITING)
    anna = pair[0].lockstep("run", "--workers", "4", *options("2"), "script.py", cwd=folder)
    bert = pair[1].lockstep("run", "--workers", "6", *options("2"), "script.py", cwd=folder)
    (code, _, err), (other_code, _, other_err) = anna.end(), bert.end()
    assert (code, other_code) == (2, 2)
    assert last(err) == last(other_err)
    values = {"4 (2 a host) on anna (10.78.0.1)", "6 (3 a host) on bert (10.78.0.2)"}
    assert last(err).startswith("error: --workers is ")
    assert all(value in last(err) for value in values)


@pytest.mark.parametrize(
    ("meet", "message"),
    [
        ("anna:29401", "error: bert cannot reach the meeting at 10.78.0.1:29401 (connection refused, "),
        ("10.78.0.9", "error: bert cannot reach the meeting at 10.78.0.9:29400 (no "),
        ("dora", "error: --meet dora: bert cannot resolve this name ("),
    ],
)
def test_a_meeting_that_is_not_there(pair: list[Host], folder: Path, meet: str, message: str) -> None:
    (folder / "script.py").write_text(WAITING)
    code, _, err = pair[1].lockstep("run", "--workers", "4", *options("2", meet=meet), "script.py", cwd=folder).end()
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(message)
