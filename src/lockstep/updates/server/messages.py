"""What workers and servers send to each other, point to point: a header of fixed size, then flat
tensors whose sizes both know.

It uses neither torch RPC (deprecated, and it unpickles what arrives) nor pickle. A header is
float64 numbers; integers below 2^53 are exact. Each pair of ranks has two lines, one for questions
and one for answers, so that a rank's questions never mix with its answers. A peer's death is an
error on its line and on no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.collectives.group import Group
from lockstep.errors import PeerFailed

NEXT, PULL, PUSH, SQUARES, APPLY, BYE = range(6)
"""Kinds of questions: NEXT to the `Dispatcher`, then four to a shard. BYE: no more questions."""
BROKEN = -1.0
"""Sent instead of an answer."""
HEADER = 20  # numbers in a header, besides one for each rank
_QUESTIONS, _ANSWERS = 1, 2

Header = Sequence[float]


class PeerLines:
    """The lines of one rank to all others, over a process group of their own. Many threads may use
    them, each another line.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, everyone: Group, timeout: timedelta
    ) -> None:
        self._group, self._everyone, self._timeout = process_group, everyone, timeout
        self._size = HEADER + everyone.size
        self._counting = Lock()

    def ask(
        self,
        peers: Sequence[int],
        header: Header,
        leaving: Sequence[Sequence[Tensor]],
        arriving: Sequence[Sequence[Tensor]],
    ) -> list[list[float]]:
        """Ask all `peers` the same, and send each its `leaving` tensors. Return the headers of
        their answers, when the `arriving` tensors of each are filled.

        Raises PeerFailed if a peer has gone.
        """
        question, answers, works = self._pack(header), [self._empty() for _ in peers], []
        for peer, out, answer, into in zip(peers, leaving, answers, arriving, strict=True):
            with _missed(peer):
                first = self._group.recv([answer], peer, _ANSWERS)
                sent = [self._send(peer, each, _QUESTIONS) for each in (question, *out)]
                works.append(
                    (first, [*sent, *(self._group.recv([each], peer, _ANSWERS) for each in into)])
                )
        for peer, answer, (first, rest) in zip(peers, answers, works, strict=True):
            with _missed(peer):
                first.wait(self._timeout)
                if answer[0] == BROKEN:
                    raise PeerGone(peer, "its server failed, as its own error says")
                for work in rest:
                    work.wait(self._timeout)
        return [answer.tolist() for answer in answers]

    def listen(self, peer: int) -> list[float]:
        """Return the header of the peer's next question. Raises PeerFailed."""
        header = self._empty()
        self.take(peer, [header])
        return header.tolist()

    def take(self, peer: int, tensors: Sequence[Tensor]) -> None:
        """Receive the tensors that come with the peer's question."""
        with _missed(peer):
            for work in [self._group.recv([each], peer, _QUESTIONS) for each in tensors]:
                work.wait()

    def answer(self, peer: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        with _missed(peer):
            for work in [
                self._send(peer, each, _ANSWERS) for each in (self._pack(header), *tensors)
            ]:
                work.wait()

    def say_bye(self, peer: int) -> None:
        """Tell a peer that this rank asks nothing more."""
        with _missed(peer):
            self._send(peer, self._pack([BYE]), _QUESTIONS).wait(self._timeout)

    def _send(self, peer: int, tensor: Tensor, line: int) -> dist.Work:
        with self._counting:
            self._everyone.bytes_sent += tensor.nbytes
        return self._group.send([tensor], peer, line)

    def _pack(self, header: Header) -> Tensor:
        packed = self._empty()
        packed[: len(header)] = torch.tensor(header, dtype=torch.float64)
        return packed

    def _empty(self) -> Tensor:
        return torch.zeros(self._size, dtype=torch.float64)


@contextmanager
def _missed(peer: int) -> Iterator[None]:
    """Treat a broken line as the end of its peer."""
    try:
        yield
    except PeerFailed:
        raise
    except RuntimeError as error:
        raise PeerGone(peer, str(error)) from error


class PeerGone(PeerFailed):
    """The line to a rank has broken."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__("peer-gone", rank=rank, why=why)
        self.rank = rank
