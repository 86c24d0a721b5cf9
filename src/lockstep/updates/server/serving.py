"""The threads of a rank that answer for its desk and its shard: one for each other rank, asleep until that one asks.

What a rank asks is answered in order, and nobody's question waits for somebody else's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread

from lockstep.updates.server.counter import Answer, Apply, Course, Draw, Meet, Pushed
from lockstep.updates.server.desk import Desk
from lockstep.updates.server.messages import APPLY, BROKEN, BYE, NEXT, PULL, PUSH, SQUARES, Gone, Lines
from lockstep.updates.server.shard import Shard

_DRAW, _APPLY, _MEET, _GONE = range(4)
_NOTHING, _PUSHED, _APPLIED = range(3)
REASONS = ("", "weight", "loss", "norm")
"""Why a window was left out, in a header."""
_PATIENCE_SECONDS = 5.0


class Serving:
    """Until every other rank has said that it asks no more, or has gone."""

    def __init__(self, lines: Lines, peers: Sequence[int], desk: Desk | None, shard: Shard | None) -> None:
        self._lines, self._desk, self._shard = lines, desk, shard
        self.error: Exception | None = None
        """What went wrong in a thread, of an optimizer, say."""
        self._threads = [Thread(target=self._serve, args=(peer,), name=f"lockstep server for rank {peer}", daemon=True) for peer in peers]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    def _serve(self, peer: int) -> None:
        try:
            while self._answered(peer, self._lines.listen(peer)):
                pass
        except Gone:
            if self._desk is not None:
                self._desk.lost(peer)
        except Exception as error:  # for the main thread, which raises it; the peer must not wait for ever
            self.error = error
            with suppress(Gone):
                self._lines.answer(peer, [BROKEN])

    def _answered(self, peer: int, question: Sequence[float]) -> bool:
        kind = int(question[0])
        if kind == NEXT:
            assert self._desk is not None
            said, course, stop = _question(question)
            self._lines.answer(peer, answer_header(self._desk.ask(peer, course, said, stop=stop), self._desk))
        elif kind == BYE:
            return False
        elif kind == PULL:
            version, steps, tensors = self._its_shard().pull()
            self._lines.answer(peer, [version, steps], tensors)
        elif kind == PUSH:
            gradients = self._its_shard().like()
            self._lines.take(peer, gradients)
            window, number, version = map(int, question[1:4])
            self._lines.answer(peer, [self._its_shard().push(window, number, version, question[4], gradients)])
        elif kind == SQUARES:
            self._lines.answer(peer, [self._its_shard().squares(int(question[1]))])
        elif kind == APPLY:
            self._lines.answer(peer, [self._its_shard().apply(int(question[1]), question[2], skip=bool(question[3]))])
        return True

    def _its_shard(self) -> Shard:
        assert self._shard is not None
        return self._shard


def question_header(course: Course, said: Pushed | str | None, *, stop: bool) -> list[float]:
    """For NEXT."""
    header: list[float] = [NEXT, stop, course.epoch, course.first, course.begin, course.windows, course.slots, course.last]
    if isinstance(said, Pushed):
        draw = said.draw
        return [
            *header,
            _PUSHED,
            draw.place,
            draw.number,
            draw.draws,
            draw.first,
            draw.last,
            said.weight,
            said.loss,
            said.samples,
            said.version,
        ]
    return [*header, _NOTHING] if said is None else [*header, _APPLIED, REASONS.index(said)]


def _question(header: Sequence[float]) -> tuple[Pushed | str | None, Course, bool]:
    course, kind, rest = Course(*map(int, header[2:8])), int(header[8]), header[9:]
    said: Pushed | str | None = None
    if kind == _PUSHED:
        said = Pushed(Draw(*map(int, rest[:5])), rest[5], rest[6], int(rest[7]), int(rest[8]))
    elif kind == _APPLIED:
        said = REASONS[int(rest[0])]
    return said, course, bool(header[1])


def answer_header(answer: Answer | None, desk: Desk) -> list[float]:
    if isinstance(answer, Draw):
        return [_DRAW, answer.place, answer.number, answer.draws, answer.first, answer.last]
    if isinstance(answer, Apply):
        return [_APPLY, answer.place, answer.weight, answer.loss]
    if isinstance(answer, Meet):
        living = [float(rank in answer.living) for rank in range(max(answer.living) + 1)]
        return [_MEET, answer.place, answer.stop, answer.over, answer.weight, answer.loss, len(living), *living]
    return [_GONE, math.nan if desk.gone is None else desk.gone]


def answer_of(header: Sequence[float]) -> Answer | int | None:
    """What `answer_header` made: an answer, or the rank that has gone (None: this one is taken for dead)."""
    kind, rest = int(header[0]), header[1:]
    if kind == _DRAW:
        return Draw(*map(int, rest[:5]))
    if kind == _APPLY:
        return Apply(int(rest[0]), rest[1], rest[2])
    if kind == _MEET:
        living = tuple(rank for rank, here in enumerate(rest[6 : 6 + int(rest[5])]) if here)
        return Meet(int(rest[0]), bool(rest[1]), bool(rest[2]), living, rest[3], rest[4])
    return None if math.isnan(rest[0]) else int(rest[0])
