"""Lightning's Trainer and Fabric with Lockstep's strategies, as with their own DDP; and with a
Loader, as in one process. What the two ranks do, and refuse, is lightning_script.py's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import lockstep
from tests.integrations.scripts import close, data, one_process, run

pytestmark = pytest.mark.rest

SCRIPT = Path(__file__).with_name("lightning_script.py")
GLOBAL_BATCH, SAVED = 8, 7


def test_two_ranks_train_as_one_process_and_resume_as_one(tmp_path: Path) -> None:
    loader = lockstep.Loader(data(), global_batch=GLOBAL_BATCH, seed=3, rank=0, size=1)
    first, second = run(SCRIPT, 2, tmp_path)
    weights, seen, _ = one_process(loader)
    together = [one + other for one, other in zip(first["seen"], second["seen"], strict=True)]
    tails = [number for number, samples in enumerate(seen) if len(samples) < GLOBAL_BATCH]
    for number, (samples, expected) in enumerate(zip(together, seen, strict=True)):
        # of the short last step rank 1 has nothing, and walks what rank 0 has, with weight 0
        assert samples == (expected * 2 if number in tails else expected)
    assert tails
    close(first["weights"], weights)
    close(second["resumed"], weights)
    assert second["seen after"] == first["seen after"] == seen[SAVED:]
    close(first["accumulated"], one_process(loader, weighing=True, accumulate=4)[0])
