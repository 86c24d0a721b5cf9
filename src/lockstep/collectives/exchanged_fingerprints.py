"""Comparison of collectives among ranks that share no memory: they exchange hashes before each one.

The page of a host (fingerprints.py) costs nothing. This costs one small message per collective, and
every collective waits for the slowest rank. So it runs only if asked for, to find a mistake:
`lockstep.init(tags="all")`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.collectives.fingerprints import Uncompared, different, listed, timed_out
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerFailed

_LET_THE_OTHERS_SAY = timedelta(seconds=1)  # for other ranks to write that they also wait


class ExchangedFingerprints(Uncompared):
    """Compares one group's collectives when their numbers are posted. It uses a gloo group of the
    same ranks that nothing else uses.
    """

    compares = True

    def __init__(
        self,
        store: dist.Store,
        name: str,
        process_group: dist.ProcessGroup,
        ranks: Sequence[int],
        timeout: timedelta,
    ) -> None:
        self._store = dist.PrefixStore(f"tags/{name}", store)
        self._group = process_group
        self._rank = dist.get_rank(process_group)
        self._ranks = tuple(ranks)  # numbers in the world, for messages
        self._timeout = timeout

    def post(self, number: int, text: str) -> None:
        """Announce `text` as this rank's collective `number`, and compare it with all ranks.

        Raises CollectiveMismatch on all ranks, PeerFailed if a rank has gone, and CollectiveTimeout
        with the ranks that did not come.
        """
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        local = torch.tensor([number, int.from_bytes(digest, "big")])
        by_rank = [torch.zeros(2, dtype=torch.int64) for _ in self._ranks]
        try:
            work = dist.all_gather(by_rank, local, group=self._group, async_op=True)
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._failure(number, text, error) from error
        if any(not torch.equal(remote, local) for remote in by_rank):
            raise self._mismatch(number, text)

    def _mismatch(self, number: int, text: str) -> CollectiveMismatch:
        self._store.set(f"said/{number}/{self._rank}", text)
        texts = []
        for rank in range(len(self._ranks)):
            texts.append(self._store.get(f"said/{number}/{rank}").decode())
        return different(number, texts, self._ranks)

    def _failure(
        self, number: int, text: str, error: RuntimeError
    ) -> CollectiveTimeout | PeerFailed:
        """Return the error of a comparison that failed. Ask which other ranks also wait for it."""
        self._store.set(f"waiting/{number}/{self._rank}", "")
        deadline = time.monotonic() + _LET_THE_OTHERS_SAY.total_seconds()
        missing = self._not_waiting(number)
        while missing and time.monotonic() < deadline:
            time.sleep(0.01)
            missing = self._not_waiting(number)
        if time.monotonic() < deadline or not missing:
            return PeerFailed(
                "peer-left-collective",
                number=number,
                call=text,
                who=listed(missing) if missing else "a rank",
                error=str(error),
            )
        return timed_out(number, text, missing, self._timeout)

    def _not_waiting(self, number: int) -> list[int]:
        return [
            world
            for rank, world in enumerate(self._ranks)
            if not self._store.check([f"waiting/{number}/{rank}"])
        ]
