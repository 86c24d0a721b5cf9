"""Ranks of a simulated generation, and how they hear of each other."""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from lockstep.errors import PeerFailed
from tests.simulation.machine import Machine, Process


class Generation:
    """So many ranks; `members` are their processes."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.machine, self.size = machine, size
        self.members: list[Process] = []
        self.heeding = [False] * size
        """Whether a rank heeds signals that ask it to stop."""
        self.asked = [False] * size
        """Whether it was."""
        self.ports = [0] * size
        """Where each was told to look for the store."""
        self._rounds: list[dict[int, str]] = []
        self._at = [0] * size

    def everybodys(self, rank: int, mine: Any) -> list[Any]:
        """What all say, by rank, as a collective over a process group. Raises PeerFailed where
        one has gone.
        """
        self.machine.point("says", mine)
        at = self._at[rank]
        self._at[rank] += 1
        if at == len(self._rounds):
            self._rounds.append({})
        said = self._rounds[at]
        said[rank] = json.dumps(mine)
        if len(said) < self.size:
            self.machine.wait(lambda: len(said) == self.size or self._gone(said))
        if len(said) < self.size:
            raise PeerFailed("peer-failed", rank=rank)
        return [json.loads(said[each]) for each in range(self.size)]

    def _gone(self, said: dict[int, str]) -> bool:
        return any(
            not member.living for rank, member in enumerate(self.members) if rank not in said
        )


class Store:
    """A key-value store in a process of its own, as its ranks see it; `callers` are the
    generations that they are of.
    """

    def __init__(self, machine: Machine, host: Process) -> None:
        self._machine, self._host = machine, host
        self._values: dict[str, bytes] = {}
        self.callers: set[Generation] = set()

    def _point(self, *what: object) -> None:
        self._machine.point(*what)
        if not self._host.living:
            raise dist.DistNetworkError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._point("sets", key, value)
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._point("gets", key)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._point("checks", *keys)
        return all(key in self._values for key in keys)

    def add(self, key: str, number: int) -> int:
        self._point("adds to", key, number)
        found = int(self._values.get(key, b"0")) + number
        self._values[key] = str(found).encode()
        return found

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._point("compares and sets", key, value)
        if self._values.get(key, b"").decode() == expected:
            self._values[key] = value.encode()
        return self._values.get(key, expected.encode())
