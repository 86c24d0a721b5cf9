"""Promise 4: after kills at any time, as many as one likes, a training ends with the bits of one that
nobody disturbed. benchmarks/chaos.py has it at length.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.errors import WorkerFailed
from lockstep.testing import run_ranks
from tests.training import toy

STEPS = 12


def trained(
    world: lockstep.World, run: Path | None, kill: tuple[int, int] | None = None
) -> tuple[str, int]:
    """The digest of the result, and how many steps were taken here. `kill`: a rank and the step
    in which it is killed.
    """
    taken = 0

    def on_step(record: dict[str, Any]) -> None:
        nonlocal taken
        taken += 1
        if kill == (world.rank, record["step"]):
            os.kill(os.getpid(), signal.SIGKILL)

    task = toy.task(on_step=on_step, callbacks_on="all", epochs=STEPS // 4)
    every = {} if run is None else {"checkpoint_every": 3}
    return lockstep.train(task, run=run, world=world, exact=True, **every).sha256, taken


def test_two_kills_on_other_numbers_of_ranks_leave_the_bits_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    ((undisturbed, taken),) = run_ranks(trained, 1, args=(None,))
    assert taken == STEPS
    for workers, kill in ((2, (1, 5)), (3, (0, 8))):
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            run_ranks(trained, workers, args=(tmp_path / "run", kill))
        assert not (tmp_path / "run" / "result.json").exists()
    for digest, taken in run_ranks(trained, 2, args=(tmp_path / "run",)):
        assert digest == undisturbed
        assert 0 < taken < STEPS


@pytest.mark.rest
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("seed", "count", "options"),
    [
        # of this seed are six pairs of a victim and a phase, with each of both
        (912, 6, ()),
        (0, 4, ("--warm",)),
    ],
    ids=["by hand", "restarted"],
)
def test_a_training_that_is_killed_again_and_again_ends_with_the_same_weights(
    tmp_path: Path, seed: int, count: int, options: tuple[str, ...]
) -> None:
    """Kills from outside, on one to four workers. Takes half a minute or more each."""
    script = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
    command = [sys.executable, str(script), "--seeds", str(seed), "--faults", str(count), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"faults {count}, restarts {count}" in done.stdout
    assert done.stdout.endswith(f"{count} faults with 1 seeds, 0 problems\n")
