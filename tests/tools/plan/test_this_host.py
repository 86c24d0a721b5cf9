"""What is timed on this host's ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.collectives.work import Work
from lockstep.config.parallelism import Parallelism
from lockstep.gradients.facts import numbers
from lockstep.tools.plan import this_host


def test_the_small_message_is_as_long_as_the_facts_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, real = set(), Group.all_reduce

    def heard(group: Group, tensor: Tensor, *more: Any) -> Work:
        sizes.add(tensor.numel())
        return real(group, tensor, *more)

    monkeypatch.setattr(Group, "all_reduce", heard)
    this_host._on_rank(4096, Parallelism(), "cpu")
    assert sizes - {1, 15} == {numbers(1)}  # ranks meet, and agree about 15 times
