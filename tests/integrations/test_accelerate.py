"""Accelerate with Lockstep's wrapper as with its own DDP; and with a Loader, as in one process.
What the ranks do, and refuse, is accelerate_script.py's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from tests.integrations.scripts import close, data, joined, one_process, run

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).with_name("accelerate_script.py")
MICRO_BATCH, SAVED = 3, 9


def test_two_ranks_train_as_one_process_and_three_resume_as_one(tmp_path: Path) -> None:
    loader = lockstep.Loader(
        data(), global_batch=12, micro_batch=MICRO_BATCH, seed=3, rank=0, size=1
    )
    weights, seen, rate = one_process(loader, norm=True, gamma=0.98)
    weighed, _, _ = one_process(loader, norm=True, gamma=0.98, weighing=True)
    two = run(SCRIPT, 2, tmp_path)
    assert joined(two, "whole") == seen
    assert len(seen[6]) % (2 * MICRO_BATCH) != 0  # a short step
    for rank in two:
        close(rank["whole"]["weights"], weights)
        close(rank["weighing"]["weights"], weighed)
        assert rank["whole"]["rate"] == pytest.approx(rate)
    three = run(SCRIPT, 3, tmp_path)
    assert joined(three, "resumed") == seen[SAVED:]
    stream = lockstep.Loader(
        data(), global_batch=12, micro_batch=MICRO_BATCH, shuffle=False, rank=0, size=1
    )
    from_stream, in_order, _ = one_process(stream, norm=True, gamma=0.98)
    assert joined(two, "stream") == in_order
    assert joined(three, "stream") == in_order[SAVED:]
    for rank in three:
        close(rank["resumed"]["weights"], weights)
        close(rank["stream"]["weights"], from_stream)
