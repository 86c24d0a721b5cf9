"""transformers.Trainer with the loss curve of one process on 1, 2 and 3 ranks. What the ranks do,
and refuse, is transformers_script.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.testing.ranks import warm_commands
from tests.integrations.scripts import joined, run

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).with_name("transformers_script.py")
SAVED = 6


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    """Ranks are forked from a process that has imported transformers: it takes seconds."""
    with warm_commands(
        (
            "transformers.trainer",
            "transformers.models.gpt2.modeling_gpt2",
            "lockstep.step.data_parallel",
            "pytest",
        )
    ):
        yield


def test_the_loss_curve_is_that_of_one_process_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    two, (one,), three = (run(SCRIPT, workers, tmp_path) for workers in (2, 1, 3))
    expected = pytest.approx(one["by hand"], rel=1e-5)
    assert one["trained"]["losses"] == expected
    assert two[0]["trained"]["losses"] == expected
    assert three[0]["trained"]["losses"] == pytest.approx(one["by hand"][SAVED:], rel=1e-5)
    seen = one["trained"]["seen"]
    assert joined(two, "trained") == seen
    assert joined(three, "trained") == seen[SAVED:]
    # a stream, whose samples come in its own order
    for ranks, begin in ((two, 0), (three, SAVED)):
        losses = one["stream"]["losses"][begin:]
        assert ranks[0]["stream"]["losses"] == pytest.approx(losses, rel=1e-5)
        assert joined(ranks, "stream") == one["stream"]["seen"][begin:]
    assert one["stream"]["seen"][:2] == [[*range(12)], [*range(12, 24)]]
