"""Who answers the ranks' questions: the `Dispatcher`, which lets many ranks ask the Counter at once,
and the threads of a rank for its `Dispatcher` and its shard.

There is one thread for each other rank, asleep until that rank asks. A rank's questions are
answered in order, and no question waits for another rank's. A rank that has to wait does so at the
`Dispatcher`, which also learns of a rank's death.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from threading import Condition, Thread

from lockstep.updates.server.counter import (
    Answer,
    Apply,
    Counter,
    Draw,
    EpochCourse,
    Pushed,
    Synchronize,
    WindowDone,
)
from lockstep.updates.server.messages import (
    APPLY,
    BROKEN,
    BYE,
    NEXT,
    PULL,
    PUSH,
    SQUARES,
    PeerGone,
    PeerLines,
)
from lockstep.updates.server.shard import ServerShard

_DRAW, _APPLY, _SYNCHRONIZE, _GONE = range(4)
_NOTHING, _PUSHED, _APPLIED = range(3)
REASONS = ("", "weight", "loss", "norm")
"""Why a window was left out; a header holds the index."""
_PATIENCE_SECONDS = 5.0
_LOOK_SECONDS = 0.2  # between two checks for dead ranks


class Dispatcher:
    """The dispatcher on rank 0. Its own worker asks it, and so do the threads for the others'.

    `needed`: the ranks below this number hold parameters and must live. `dead(rank)` checks whether
    a rank is dead.
    """

    def __init__(self, counter: Counter, needed: int, dead: Callable[[int], bool]) -> None:
        self._counter, self._needed, self._dead = counter, needed, dead
        self._changed = Condition()
        self._looked = time.monotonic()
        self.gone: int | None = None
        """A needed rank that has died or failed, so that no rank can continue; else None."""
        self._applied: list[tuple[WindowDone, float]] = []

    def ask(
        self, rank: int, course: EpochCourse, said: Pushed | str | None, *, stop: bool
    ) -> Answer | None:
        """Return what `rank` must do next, once there is something. `said` reports the draw that it
        has pushed; or, for a window, why it did not apply it ("" if it did).

        Returns None if a needed rank has gone, or if `rank` itself counts as dead.
        """
        with self._changed:
            if rank not in self._counter.living:
                return None
            if isinstance(said, Pushed):
                self._counter.pushed(rank, said)
            elif said is not None:
                self._applied.append((self._counter.applied(rank, said), time.perf_counter()))
            if stop:
                self._counter.ask_to_stop()
            self._changed.notify_all()
            while self.gone is None and rank in self._counter.living:
                answer = self._counter.next(rank, course)
                if answer is not None:
                    self._changed.notify_all()
                    return answer
                self._changed.wait(_LOOK_SECONDS)
                self._look()
            return None

    def _look(self) -> None:
        """Check for ranks that died while they waited here, when no thread listened to them."""
        now = time.monotonic()
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            for rank in sorted(self._counter.living):
                if self._dead(rank):
                    self._lost(rank)

    def lost(self, rank: int) -> None:
        """Note that a rank has died, or has closed its line without BYE."""
        with self._changed:
            self._lost(rank)
            self._changed.notify_all()

    def _lost(self, rank: int) -> None:
        if rank < self._needed:
            self.gone = rank if self.gone is None else self.gone
        else:
            self._counter.died(rank)

    def synchronize_before(self, window: int) -> None:
        with self._changed:
            self._counter.synchronize_before(window)

    def applied(self) -> list[tuple[WindowDone, float]]:
        """Return the windows that were applied since the last call, and when they were
        (perf_counter).
        """
        with self._changed:
            found, self._applied = self._applied, []
            return found


class Serving:
    """The serving threads. Each ends when its rank has said BYE, or has gone."""

    def __init__(
        self,
        lines: PeerLines,
        peers: Sequence[int],
        dispatcher: Dispatcher | None,
        shard: ServerShard | None,
    ) -> None:
        self._lines, self._dispatcher, self._shard = lines, dispatcher, shard
        self.error: Exception | None = None
        """An error in a thread, for example in an optimizer."""
        self._threads = [
            Thread(
                target=self._serve,
                args=(peer,),
                name=f"lockstep server for rank {peer}",
                daemon=True,
            )
            for peer in peers
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def _serve(self, peer: int) -> None:
        try:
            while self._answered(peer, self._lines.listen(peer)):
                pass
        except PeerGone:
            if self._dispatcher is not None:
                self._dispatcher.lost(peer)
        except Exception as error:
            # the main thread raises the error; the answer keeps the peer from waiting forever
            self.error = error
            with suppress(PeerGone):
                self._lines.answer(peer, [BROKEN])

    def _answered(self, peer: int, question: Sequence[float]) -> bool:
        kind = int(question[0])
        if kind == NEXT:
            assert self._dispatcher is not None
            said, course, stop = _question(question)
            self._lines.answer(
                peer,
                answer_header(
                    self._dispatcher.ask(peer, course, said, stop=stop), self._dispatcher
                ),
            )
        elif kind == BYE:
            return False
        elif kind == PULL:
            version, steps, tensors = self._its_shard().pull()
            self._lines.answer(peer, [version, steps], tensors)
        elif kind == PUSH:
            gradients = self._its_shard().like()
            self._lines.take(peer, gradients)
            window, number, version = map(int, question[1:4])
            self._lines.answer(
                peer, [self._its_shard().push(window, number, version, question[4], gradients)]
            )
        elif kind == SQUARES:
            self._lines.answer(peer, [self._its_shard().squares(int(question[1]))])
        elif kind == APPLY:
            self._lines.answer(
                peer,
                [self._its_shard().apply(int(question[1]), question[2], skip=bool(question[3]))],
            )
        return True

    def _its_shard(self) -> ServerShard:
        assert self._shard is not None
        return self._shard


def question_header(course: EpochCourse, said: Pushed | str | None, *, stop: bool) -> list[float]:
    """Return the header of a NEXT question."""
    header: list[float] = [NEXT, stop, *astuple(course)]
    if isinstance(said, Pushed):
        pushed = [said.weight, said.loss, said.samples, said.version]
        return [*header, _PUSHED, *astuple(said.draw), *pushed]
    return [*header, _NOTHING] if said is None else [*header, _APPLIED, REASONS.index(said)]


def _question(header: Sequence[float]) -> tuple[Pushed | str | None, EpochCourse, bool]:
    course, kind, rest = EpochCourse(*map(int, header[2:8])), int(header[8]), header[9:]
    said: Pushed | str | None = None
    if kind == _PUSHED:
        said = Pushed(Draw(*map(int, rest[:5])), rest[5], rest[6], int(rest[7]), int(rest[8]))
    elif kind == _APPLIED:
        said = REASONS[int(rest[0])]
    return said, course, bool(header[1])


def answer_header(answer: Answer | None, dispatcher: Dispatcher) -> list[float]:
    if isinstance(answer, Draw):
        return [_DRAW, *astuple(answer)]
    if isinstance(answer, Apply):
        return [_APPLY, *astuple(answer)]
    if isinstance(answer, Synchronize):
        living = [float(rank in answer.living) for rank in range(max(answer.living) + 1)]
        told = [answer.place, answer.stop, answer.over, answer.weight, answer.loss]
        return [_SYNCHRONIZE, *told, len(living), *living]
    return [_GONE, math.nan if dispatcher.gone is None else dispatcher.gone]


def answer_of(header: Sequence[float]) -> Answer | int | None:
    """Decode what `answer_header` made: an answer, or the rank that has gone (None: this rank
    counts as dead).
    """
    kind, rest = int(header[0]), header[1:]
    if kind == _DRAW:
        return Draw(*map(int, rest[:5]))
    if kind == _APPLY:
        return Apply(int(rest[0]), rest[1], rest[2])
    if kind == _SYNCHRONIZE:
        living = tuple(rank for rank, here in enumerate(rest[6 : 6 + int(rest[5])]) if here)
        return Synchronize(int(rest[0]), bool(rest[1]), bool(rest[2]), living, rest[3], rest[4])
    return None if math.isnan(rest[0]) else int(rest[0])
