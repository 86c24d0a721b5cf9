"""The last comparison of replicas, when a world closes. It goes through the store: no rank waits for
another one's answer, so a rank that has left early holds nobody up.

Every rank writes its answers before it reads the others', so the last one to read sees all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from weakref import WeakMethod

import torch.distributed as dist

from lockstep.errors import ReplicaDivergence

Digests = Callable[[], Mapping[str, int]]


class LastComparison:
    """What this rank compares with the others at the end. Every rank makes it alike."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._methods: list[WeakMethod[Digests]] = []

    def add(self, digests: Digests) -> None:
        """Compare what the method `digests` returns then, unless its object has been freed."""
        self._methods.append(WeakMethod(digests))

    def publish(self) -> None:
        """Write this rank's answers."""
        if self._size == 1:
            return
        with suppress(dist.DistError):  # the store ends with the rank that hosts it
            for number, method in enumerate(self._methods):
                digests = method()
                if digests is not None:
                    self._store.set(f"end/{number}/{self._rank}", json.dumps(digests()))

    def compare(self) -> None:
        """Compare the answers that all ranks have given by now: values of one name are equal.

        Raises:
            ReplicaDivergence: they are not.
        """
        answers: dict[str, dict[int, int]] = {}
        with suppress(dist.DistError):
            for number in range(len(self._methods)):
                for rank in range(self._size):
                    key = f"end/{number}/{rank}"
                    if self._store.check([key]):
                        for name, value in json.loads(self._store.get(key)).items():
                            answers.setdefault(name, {})[rank] = value
        for name, by_rank in answers.items():
            [(usual, _)] = Counter(by_rank.values()).most_common(1)
            others = [rank for rank, value in by_rank.items() if value != usual]
            if others:
                raise ReplicaDivergence("replicas-differ-at-end", parameter=name, ranks=others)
