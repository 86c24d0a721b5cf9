"""Six kills from outside, on one to four workers, and the weights of a run that nobody
disturbed. benchmarks/chaos.py has it at length.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest


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
    """Takes half a minute or more each."""
    script = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
    command = [sys.executable, str(script), "--seeds", str(seed), "--faults", str(count), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"faults {count}, restarts {count}" in done.stdout
    assert done.stdout.endswith(f"{count} faults with 1 seeds, 0 problems\n")
