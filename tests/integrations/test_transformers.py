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
            "transformers.models.bert.modeling_bert",
            "lockstep.step.data_parallel",
            "pytest",
        )
    ):
        yield


def test_the_loss_curve_is_that_of_one_process_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    """More than 5 s: six ranks of transformers."""
    two, (one,), three = (
        run(SCRIPT, 2, tmp_path),
        run(SCRIPT, 1, tmp_path),
        run(SCRIPT, 3, tmp_path),
    )
    for kind in ("gpt2", "bert"):
        expected = pytest.approx(one[f"{kind} by hand"]["losses"], rel=1e-5)
        assert one[kind]["losses"] == expected
        assert two[0][kind]["losses"] == expected
        assert three[0][kind]["losses"] == pytest.approx(one[kind]["losses"][SAVED:], rel=1e-5)
        assert joined(two, kind) == one[kind]["seen"]
        assert joined(three, kind) == one[kind]["seen"][SAVED:]
