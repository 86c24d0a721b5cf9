"""Runs on a Ray cluster of three nodes on this machine: the bits of one process, whatever
becomes of nodes, ranks and the driver.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.training.train import train
from tests.clusters import Cluster, cluster, wait_until_none_is_left
from tests.training import toy

pytestmark = pytest.mark.rest

NODE = r"\S+ \(127\.0\.0\.1, \w{6}\)"
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
    return toy.task(name=None, model=Net, epochs=8)
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
    return train(toy.task(epochs=8), exact=True).sha256


def last(text: str) -> str:
    return text.splitlines()[-1]


def test_nodes_that_are_killed_that_come_and_that_are_taken_away_do_not_change_a_bit(
    nodes: Cluster, folder: Path, undisturbed: str
) -> None:
    """Four generations: before and after a node is killed, with one that has come, and without one
    that is about to be taken away. Only the killed one counts as a restart.
    """
    options = "--exact --workers 2:6 --run run --checkpoint-every 2 --max-restarts 1"
    driver = nodes.lockstep("train", "my_task.py", *options.split(), cwd=folder, GATED="1")
    driver.wait_for(folder / "at-1-0")
    nodes.kill_node()
    driver.wait_for(folder / "at-2-0")
    nodes.add_node()
    driver.wait_for(folder / "run" / "wanted")
    (folder / "go-2").touch()
    driver.wait_for(folder / "at-3-0")
    nodes.drain_node(600)
    assert driver.process.stderr is not None
    lines = [""]
    while "is about to be taken away: saving after this step" not in lines[-1]:
        lines.append(driver.process.stderr.readline())
        assert lines[-1], "it was not noticed"
    for number in (3, 4):
        (folder / f"go-{number}").touch()
    code, out, err = driver.end()
    before = "".join(lines)
    assert code == 0, before + err
    killed = r"^node .* has gone; with it went ranks . and . of 6; .*\(restart 1 of 1\)$"
    assert re.search(killed, before, re.MULTILINE), before
    assert "resumed from step" in before
    assert "resuming without node" in err
    assert re.search(r"^resumed from step \d+ of 32$", err, re.MULTILINE)
    assert "32 steps, 4 workers, replicated, " in out
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    nodes.kill_node()
    nodes.add_node()


# Generation N, which counts the files that rank 0 has left, waits in a step until it is asked to stop.
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import lockstep

if os.environ.get("RANK", "0") == "0":
    Path(f"begun-{len(list(Path().glob('begun-*'))) + 1}").touch()
x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
with lockstep.init() as world:
    world.heed_signals()
    stepper = lockstep.Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.01), exact=True)
    loader = lockstep.Loader(TensorDataset(x, (x.sum(1) > 0).long()), global_batch=12, micro_batch=2)
    checkpoints = lockstep.Checkpoints("mine", stepper, loader, every=2)
    checkpoints.resume()
    number = len(list(Path().glob("begun-*")))
    for epoch in loader.epochs(4):
        for window in epoch:
            if stepper.steps == {1: 6, 2: 10, 3: 16}.get(number) and "GATED" in os.environ:
                Path(f"at-{number}-{world.rank}").touch()
                while not world.asked_to_stop:
                    time.sleep(0.02)
            for x, y in stepper.micro_batches(window):
                stepper.backward(F.cross_entropy(model(x), y), weight=len(y), reduction="mean")
            result = stepper.step()
            checkpoints.step()
            if result.stop:
                checkpoints.close()
                sys.exit(75)
    checkpoints.close()
    if world.rank == 0:
        print(world.size, lockstep.checks.identity.sha256(model.state_dict()))
"""


def test_a_script_is_restarted_as_a_training_is(nodes: Cluster, folder: Path) -> None:
    """Four generations, as above."""
    (folder / "alone").mkdir()
    for place in (folder, folder / "alone"):
        (place / "script.py").write_text(SCRIPT)
    alone = nodes.python("-m", "lockstep", "run", "-n", "1", "script.py", cwd=folder / "alone")
    code, out, err = alone.end()
    assert code == 0, err
    undisturbed = out.split()[-1]
    command = ["run", "--workers", "2:6", "--max-restarts", "1", "script.py"]
    driver = nodes.lockstep(*command, cwd=folder, GATED="1")
    driver.wait_for(folder / "at-1-0")
    nodes.kill_node()
    driver.wait_for(folder / "at-2-0")
    nodes.add_node()
    driver.wait_for(folder / "at-3-0")
    nodes.drain_node(600)
    code, out, err = driver.end()
    assert code == 0, err
    killed = r"^node .* has gone; .*; resuming from the newest checkpoint \(restart 1 of 1\)$"
    assert re.search(killed, err, re.MULTILINE), err
    assert "continuing with more nodes" in err
    assert re.search(r"^resuming without node ", err, re.MULTILINE), err
    assert out.split()[-2:] == ["4", undisturbed]
    assert "begins again" not in err
    nodes.kill_node()
    nodes.add_node()


BEGINS_AGAIN = """
import os, signal
from pathlib import Path
import lockstep

with lockstep.init() as world:
    number = len(list(Path().glob("killed-*")))
    world.barrier()
    if world.rank == 1 and number < 2:
        Path(f"killed-{number}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()
"""


def test_a_script_without_checkpoints_begins_again_and_is_told_so_once(
    nodes: Cluster, folder: Path
) -> None:
    (folder / "script.py").write_text(BEGINS_AGAIN)
    command = ["run", "--workers", "4", "--max-restarts", "2", "script.py"]
    code, _, err = nodes.lockstep(*command, cwd=folder).end()
    assert code == 0, err
    assert re.findall(r"from the beginning \(restart (.)", err) == ["1", "2"]
    assert err.count("so it begins again") == 1


def test_a_driver_that_is_asked_to_stop_saves_and_one_that_is_killed_leaves_nothing(
    nodes: Cluster, folder: Path
) -> None:
    """The second is the same command, which resumes the first on fewer ranks."""
    command = ["train", "my_task.py", "--exact", "--run", "run", "--workers"]
    driver = nodes.lockstep(*command, "5", cwd=folder, GATED="1")
    driver.wait_for(folder / "at-1-0")
    driver.process.send_signal(signal.SIGTERM)
    (folder / "go-1").touch()
    code, _, err = driver.end()
    assert (code, last(err)) == (75, "stopped by signal 15 (SIGTERM); all ranks have ended"), err
    driver = nodes.lockstep(*command, "3", cwd=folder, GATED="1")
    driver.wait_for(folder / "at-2-0")
    driver.process.kill()
    assert "resumed from step" in driver.end()[2]
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
    return toy.task(name=None, model=Net, epochs=8)
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
    assert re.fullmatch(rf"rank 3 \(pid \d+, {NODE}, log \S+\) failed: ValueError: boom", last(err))
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
    assert re.search(rf"Rank 3 is on {NODE}\.", last(err))


def test_more_ranks_than_there_is_room_for_are_waited_for_and_another_version_is_named(
    nodes: Cluster, folder: Path
) -> None:
    options = ["train", "my_task.py", "--workers"]
    code = "import lockstep\nlockstep.__version__ = '9.9'\nfrom lockstep.cli import main\nmain()"
    ray = f"--ray={nodes.address}"
    returned, _, err = nodes.python(
        "-c", code, *options, "2", "--run", "other", ray, cwd=folder
    ).end()
    assert (returned, err.count("\n")) == (2, 1), err
    assert re.match(
        rf"error: lockstep is \S+ on node {NODE} but 9\.9 at the driver.*\[version-differs\]$",
        err.rstrip(),
    ), err
    # not before: it holds all CPUs that the cluster has
    waiting = nodes.lockstep(*options, "7", "--run", "run", cwd=folder)
    assert waiting.process.stderr is not None
    line = waiting.process.stderr.readline()
    assert line.startswith("waiting for 1 more CPUs: --workers 7; nodes of the cluster: "), line
    waiting.process.send_signal(signal.SIGINT)
    returned, _, err = waiting.end()
    assert (returned, last(err)) == (130, "stopped by Ctrl-C; all ranks have ended")
    assert not (folder / "other").exists()


def test_code_that_nodes_do_not_see_is_brought_to_them(
    nodes: Cluster, folder: Path, hidden: Path | None, undisturbed: str
) -> None:
    if hidden is None:
        pytest.skip("only root can hide a folder from the nodes")
    text = TASK.replace("from tests.training import toy", "from beside import toy")
    (hidden / "my_task.py").write_text(text)
    (hidden / "beside.py").write_text("from tests.training import toy\n")
    command = ["train", "my_task.py", "--exact", "--workers", "3", "--run"]
    code, out, err = nodes.lockstep(*command, str(folder / "run"), cwd=hidden).end()
    assert code == 0, err
    assert out.endswith(f" | weights sha256 {undisturbed}\n")
    code, _, err = nodes.lockstep(*command, "run", cwd=hidden).end()
    assert code == 2
    assert last(err).startswith("error: run directory ")
    assert "[run-directory-not-shared]" in last(err)


def test_evaluate_verify_and_doctor_run_on_the_nodes(nodes: Cluster, folder: Path) -> None:
    train(toy.task(epochs=1), run=folder / "run", exact=True)
    options = ["--run", "run", "--workers", "3"]
    code, out, err = nodes.lockstep("evaluate", "my_task.py", *options, cwd=folder).end()
    assert code == 0, err
    assert "3 workers" in last(out)
    (folder / "plain.py").write_text("from tests.training import toy\ntask = toy.task\n")
    options = ["--workers", "1,3", "--exact", "--steps", "2"]
    code, out, err = nodes.lockstep("verify", "plain.py", *options, cwd=folder).end()
    assert code == 0, out + err
    assert last(out) == "verify: toy gives the same bits on 1 and 3 workers (2 steps)"
    code, out, err = nodes.lockstep("doctor", "--json", "report.json", cwd=folder).end()
    report = json.loads((folder / "report.json").read_text())
    assert code == (0 if report["fit"] else 1), out + err
    names = {link["source"] for link in report["links"]}
    assert (len(names), len(report["links"])) == (3, 6)
    wrong = {finding["name"] for finding in report["findings"] if finding["level"] == "fix"}
    assert wrong <= {"links"}, "which depend on what else runs here"
    values = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert "all_gather, reduce_scatter over 3 ranks" in values["sums"]
