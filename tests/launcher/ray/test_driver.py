"""Runs on a Ray cluster of three nodes on this machine: the bits of one process, whatever
becomes of nodes, ranks and the driver.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from lockstep.cli import run
from lockstep.cli.options import spread
from lockstep.launcher.ray.members import shared
from lockstep.training.train import train
from tests.clusters import Cluster, cluster, wait_until_none_is_left
from tests.training import toy

pytestmark = pytest.mark.rest

# Generation N, which counts the files that rank 0 has left, waits for go-N in its sixth step.
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


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A folder that the nodes do not see. Only root can hide one."""
    return tmp_path_factory.mktemp("hidden") if os.geteuid() == 0 else None


@pytest.fixture(scope="module")
def three(hidden: Path | None) -> Iterator[Cluster]:
    with cluster(hidden) as made:
        yield made


@pytest.fixture
def nodes(three: Cluster) -> Iterator[Cluster]:
    """The cluster, on which nothing is left of the runs of a test."""
    yield three
    assert wait_until_none_is_left() == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_task.py").write_text(TASK)
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights of one process on one host."""
    return train(toy.task(epochs=4), exact=True).sha256


def last(text: str) -> str:
    return text.splitlines()[-1]


def test_a_node_that_is_killed_and_one_that_comes_do_not_change_a_bit(
    nodes: Cluster, folder: Path, undisturbed: str
) -> None:
    """More than 5 s: three generations, and a raylet that is started."""
    command = [
        "train",
        "my_task.py",
        "--exact",
        "--workers",
        "2:6",
        "--run",
        "run",
        "--checkpoint-every",
        "2",
    ]
    driver = nodes.lockstep(*command, cwd=folder, GATED="1")
    driver.wait_for(folder / "at-1-0")
    nodes.kill_node()
    driver.wait_for(folder / "at-2-0")
    nodes.add_node()
    driver.wait_for(folder / "run" / "wanted")
    for number in (2, 3):
        (folder / f"go-{number}").touch()
    code, out, err = driver.end()
    assert code == 0, err
    assert "16 steps, 6 workers, replicated, " in out
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    assert re.search(
        r"^node .* has gone; with it went ranks . and . of 6; .*\(restart 1 of 3\)$",
        err,
        re.MULTILINE,
    ), err
    assert "resumed from step" in err


def test_the_driver_is_asked_to_stop_and_the_same_command_resumes_on_fewer(
    nodes: Cluster, folder: Path, undisturbed: str
) -> None:
    """More than 5 s: two runs of three and two nodes."""
    command = ["train", "my_task.py", "--exact", "--run", "run"]
    driver = nodes.lockstep(*command, "--workers", "5", cwd=folder, GATED="1")
    driver.wait_for(folder / "at-1-0")
    driver.process.send_signal(signal.SIGTERM)
    (folder / "go-1").touch()
    code, _, err = driver.end()
    assert (code, last(err)) == (75, "stopped by signal 15 (SIGTERM); all ranks have ended"), err
    code, out, err = nodes.lockstep(*command, "--workers", "3", cwd=folder).end()
    assert code == 0, err
    assert "resumed from step" in err
    assert out.endswith(f" | weights sha256 {undisturbed}\n")


def test_a_node_that_is_about_to_be_taken_away_is_left_with_a_checkpoint(
    nodes: Cluster, folder: Path, undisturbed: str
) -> None:
    """More than 5 s: two generations, and a node that comes in the place of the one that goes."""
    command = [
        "train",
        "my_task.py",
        "--exact",
        "--workers",
        "2:6",
        "--run",
        "run",
        "--max-restarts",
        "0",
    ]
    driver = nodes.lockstep(*command, cwd=folder, GATED="1")
    driver.wait_for(folder / "at-1-0")
    nodes.drain_node(600)
    assert driver.process.stderr is not None
    while "is about to be taken away: saving after this step" not in (
        line := driver.process.stderr.readline()
    ):
        assert line, "it was not noticed"
    for number in (1, 2):
        (folder / f"go-{number}").touch()
    code, out, err = driver.end()
    assert code == 0, err
    assert "resuming without node" in err
    assert re.search(r"^resumed from step \d+ of 16$", err, re.MULTILINE)
    assert "16 steps, 4 workers, replicated, " in out
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    nodes.kill_node()
    nodes.add_node()


def test_a_killed_driver_leaves_nothing(nodes: Cluster, folder: Path) -> None:
    driver = nodes.lockstep(
        "train", "my_task.py", "--workers", "3", "--run", "run", cwd=folder, GATED="1"
    )
    driver.wait_for(folder / "at-1-0")
    driver.process.kill()
    driver.end()
    assert wait_until_none_is_left() == []


CORRUPT = """
import os
from pathlib import Path
import torch
from tests.training import toy

class Net(toy.Net):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        if self.calls == 12 and os.environ["RANK"] == "2" and not Path("hurt").exists():
            Path("hurt").touch()
            hook = self.last.bias.register_hook(lambda gradient: (hook.remove(), gradient + 1)[1])
        return super().forward(x)

def task():
    return toy.task(name=None, model=Net, epochs=4)
"""


def test_a_node_whose_rank_computes_wrong_is_left_out(
    nodes: Cluster, folder: Path, undisturbed: str
) -> None:
    (folder / "my_task.py").write_text(CORRUPT)
    options = ["--workers", "2:6", "--run", "run", "--checkpoint-every", "1", "--exact"]
    options += ["--witness", "1", "--on-corruption", "exclude"]
    code, out, err = nodes.lockstep("train", "my_task.py", *options, cwd=folder).end()
    assert code == 0, err
    assert "[corrupt-micro-batch]" in err
    assert re.search(r"rank 2 .*resuming without node \S+", err)
    assert last(out).endswith(undisturbed)


def test_the_first_failure_of_another_node_is_the_last_word(nodes: Cluster, folder: Path) -> None:
    (folder / "script.py").write_text(
        "import lockstep\nworld = lockstep.init()\nprint('size', world.size)\nworld.barrier()\n"
        "if world.rank == 3:\n    raise ValueError('boom')\nworld.barrier()\n"
    )
    code, out, err = nodes.lockstep("run", "--workers", "4", "script.py", cwd=folder).end()
    assert code == 1
    # joined or not: that depends on what else runs here
    said = re.findall(r"^\[(\d)(?:-(\d))?\] size 4$", out, re.MULTILINE)
    assert sorted(rank for ranks in said for rank in ranks if rank) == ["0", "1", "2", "3"], out
    assert re.fullmatch(
        r"rank 3 \(pid \d+, \S+ \(127\.0\.0\.1, \w{6}\), log \S+\) failed: ValueError: boom",
        last(err),
    )
    assert 'script.py", line 6, in <module>' in err


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


def test_a_rank_of_another_node_that_hangs_is_named_with_its_node_and_line(
    nodes: Cluster, folder: Path
) -> None:
    """More than 5 s: before the first step a stall is declared after ten times --stall-after."""
    (folder / "script.py").write_text(SLEEPER)
    code, _, err = nodes.lockstep(
        "run", "--workers", "4", "--stall-after", "0.5", "script.py", cwd=folder
    ).end()
    assert code == 76, err
    assert re.match(
        r"STALL \d+ s: ranks 0, 1 and 2 wait in #5 \(.*\), step 0\. Rank 3 never issued it:"
        r" starting, script.py:9 read_shard",
        last(err),
    )
    assert re.search(r"Rank 3 is on \S+ \(127\.0\.0\.1, \w{6}\)\.", last(err))


def test_more_ranks_than_the_cluster_has_room_for_are_waited_for(
    nodes: Cluster, folder: Path
) -> None:
    driver = nodes.lockstep("train", "my_task.py", "--workers", "7", "--run", "run", cwd=folder)
    assert driver.process.stderr is not None
    line = driver.process.stderr.readline()
    assert line.startswith("waiting for 1 more CPUs: --workers 7; nodes of the cluster: "), line
    driver.process.send_signal(signal.SIGINT)
    code, _, err = driver.end()
    assert (code, last(err)) == (130, "stopped by Ctrl-C; all ranks have ended")


def test_a_node_with_another_version_is_named_with_both(nodes: Cluster, folder: Path) -> None:
    code = "import lockstep\nlockstep.__version__ = '9.9'\nfrom lockstep.cli import main\nmain()"
    command = [
        "-c",
        code,
        "train",
        "my_task.py",
        f"--ray={nodes.address}",
        "--workers",
        "2",
        "--run",
        "run",
    ]
    ended = nodes.python(*command, cwd=folder).end()
    assert (ended[0], ended[2].count("\n")) == (2, 1), ended[2]
    assert re.match(
        r"error: lockstep is \S+ on node \S+ \(127\.0\.0\.1, \w{6}\) but 9\.9 at the driver.*\[version-differs\]$",
        ended[2].rstrip(),
    ), ended[2]
    assert not (folder / "run").exists()


def test_a_module_that_only_the_driver_has_and_a_clock_that_is_far_off_are_named_with_the_node(
    nodes: Cluster, folder: Path, hidden: Path | None
) -> None:
    if hidden is None:
        pytest.skip("only root can hide a folder from the nodes")
    (hidden / "only_here.py").touch()
    (folder / "my_task.py").write_text("import only_here\n" + TASK)
    late = (
        "import time\nreal = time.time\ntime.time = lambda: real() + 3600\nfrom lockstep.cli import"
        " main\nmain()"
    )
    paths = os.pathsep.join([str(hidden), os.environ["PYTHONPATH"]])
    command = [
        "-c",
        late,
        "train",
        "my_task.py",
        f"--ray={nodes.address}",
        "--workers",
        "3",
        "--run",
        "run",
    ]
    code, _, err = nodes.python(*command, cwd=folder, PYTHONPATH=paths).end()
    node = r"\S+ \(127\.0\.0\.1, \w{6}\)"
    assert (
        len(
            re.findall(
                rf"^warning: the clock of node {node} is 3[56]\d\d\.\d s behind", err, re.MULTILINE
            )
        )
        == 2
    ), err
    assert code == 1
    assert re.fullmatch(
        rf"rank \d \(pid \d+, {node}, log \S+\) failed: ModuleNotFoundError: No module named"
        r" 'only_here'",
        last(err),
    ), err


def test_code_that_nodes_do_not_see_is_brought_to_them(
    nodes: Cluster, folder: Path, hidden: Path | None, undisturbed: str
) -> None:
    if hidden is None:
        pytest.skip("only root can hide a folder from the nodes")
    (hidden / "my_task.py").write_text(
        TASK.replace("from tests.training import toy", "from beside import toy")
    )
    (hidden / "beside.py").write_text("from tests.training import toy\n")
    code, out, err = nodes.lockstep(
        "train", "my_task.py", "--exact", "--workers", "3", "--run", str(folder / "run"), cwd=hidden
    ).end()
    assert code == 0, err
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    code, _, err = nodes.lockstep(
        "train", "my_task.py", "--workers", "3", "--run", "run", cwd=hidden
    ).end()
    assert code == 2
    assert last(err).startswith("error: run directory ")
    assert "[run-directory-not-shared]" in last(err)


def test_evaluate_verify_and_doctor_run_on_the_nodes(nodes: Cluster, folder: Path) -> None:
    train(toy.task(epochs=1), run=folder / "run", exact=True)
    code, out, err = nodes.lockstep(
        "evaluate", "my_task.py", "--run", "run", "--workers", "3", cwd=folder
    ).end()
    assert code == 0, err
    assert "3 workers" in last(out)
    (folder / "plain.py").write_text("from tests.training import toy\ntask = toy.task\n")
    code, out, err = nodes.lockstep(
        "verify", "plain.py", "--workers", "1,3", "--exact", "--steps", "2", cwd=folder
    ).end()
    assert code == 0, out + err
    assert last(out) == "verify: toy gives the same bits on 1 and 3 workers (2 steps)"
    code, out, err = nodes.lockstep("doctor", "--json", "found.json", cwd=folder).end()
    found = json.loads((folder / "found.json").read_text())
    assert code == (0 if found["fit"] else 1), out + err
    names = {link["source"] for link in found["links"]}
    assert (len(names), len(found["links"])) == (3, 6)
    wrong = [
        each for each in found["findings"] if each["level"] == "fix" and each["name"] != "links"
    ]  # these depend on what else runs here
    assert wrong == []
    assert "all_gather, reduce_scatter over 3 ranks" in next(
        each["value"] for each in found["findings"] if each["name"] == "sums"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ray=127.0.0.1:1", "--workers", "2"], "[ray-not-reachable]"),
        (["--ray=127.0.0.1:1", "--workers", "2"], "127.0.0.1:1"),
        (["--ray", "--nodes", "2", "--workers", "2"], "--nodes 2"),
        (["--ray"], "--workers"),
        (["--ray=nowhere", "--workers", "2"], "nowhere"),
    ],
)
def test_what_cannot_be_is_a_sentence(folder: Path, options: list[str], said: str) -> None:
    env = {**os.environ, "RAY_ADDRESS": "127.0.0.1:2"}
    command = [sys.executable, "-m", "lockstep", "train", "my_task.py", *options]
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith("error: ")
    assert said in ended.stderr


@pytest.mark.parametrize(
    ("given", "address", "rest"),
    [
        (["--ray", "--workers", "2", "a.py"], "auto", ["a.py"]),
        (["--ray", "h:1", "a.py", "--ray"], "h:1", ["a.py", "--ray"]),
        (["--workers", "2", "--ray", "a.py"], "auto", ["a.py"]),
        (["--ray=h:1", "a.py"], "h:1", ["a.py"]),
        (["a.py", "--ray"], None, ["a.py", "--ray"]),
        (["--ray", "auto", "a.py"], "auto", ["a.py"]),
        (["--ray", "ray://h:10001", "a.py"], "ray://h:10001", ["a.py"]),
    ],
)
def test_the_address_may_be_left_out_and_what_follows_the_script_is_its_own(
    given: list[str], address: str | None, rest: list[str]
) -> None:
    command = get_command(_with_run())
    context = command.make_context("run", given)
    assert (context.params["ray"], context.params["command"]) == (address, rest)


def _with_run() -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command(cls=run.COMMAND, context_settings=run.CONTEXT)(spread(run.run))
    return app


@pytest.mark.parametrize(
    ("slots", "most", "counts"),
    [
        ([2, 2, 2], 6, [2, 2, 2]),
        ([2, 2, 2], 3, [2, 1, 0]),
        ([8, 1], 4, [4, 0]),
        ([1, 4], 16, [1, 4]),
        ([], 2, []),
    ],
)
def test_nodes_are_filled_in_their_order(slots: list[int], most: int, counts: list[int]) -> None:
    assert shared(slots, most) == counts
