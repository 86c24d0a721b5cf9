"""Which pages of a private mapping are copies of this process's own."""

from __future__ import annotations

import torch

from lockstep.collectives.shared_memory.one_copy import runs_of_copies

PRESENT, SWAPPED, FILE = -(1 << 63), 1 << 62, 1 << 61  # of a 64-bit entry of the kernel's


def test_a_copy_is_one_also_when_it_is_swapped_out() -> None:
    """No test can have the kernel swap a page out: so from what it would say."""
    entries = [
        0,  # never touched
        PRESENT,
        SWAPPED | 7,  # 7: where it lies
        PRESENT | FILE | 9,
        SWAPPED | FILE,
        PRESENT | 5,
        FILE,
        SWAPPED,
    ]
    found = list(runs_of_copies(torch.tensor(entries, dtype=torch.int64)))
    assert found == [range(1, 3), range(5, 6), range(7, 8)]
    assert not list(runs_of_copies(torch.zeros(3, dtype=torch.int64)))
