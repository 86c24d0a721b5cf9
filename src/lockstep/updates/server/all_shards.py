"""The shards of all ranks as one rank reaches them: its own directly, the others by messages to the
threads that serve them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.collectives.group import Group
from lockstep.errors import LockstepError, PeerFailed
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.reducer import Reducer
from lockstep.runtime import status
from lockstep.updates.server.counter import Draw
from lockstep.updates.server.messages import APPLY, PULL, PUSH, SQUARES, PeerGone, PeerLines
from lockstep.updates.server.serving import Dispatcher, Serving
from lockstep.updates.server.shard import Masters, ServerShard
from lockstep.updates.shards import places
from lockstep.world.world import World


class AllShards:
    """The first `owners` ranks hold shards. `mine` is this rank's shard, or None. The threads end
    with the world.
    """

    def __init__(self, everyone: Group, owners: int) -> None:
        self._group, self.owners, self._rank = everyone, owners, everyone.rank
        self._others = [rank for rank in range(owners) if rank != self._rank]
        self.mine: ServerShard | None = None
        self._lines: PeerLines | None = None
        self._serving: Serving | None = None
        self.version = 0
        """The version of the last pull: how many windows had been applied before it."""
        self.steps = 0
        """How many steps the optimizer had taken before the last pull."""

    def cut(self, reducer: Reducer) -> Masters:
        """Cut the parameters between two synchronizations."""
        self.masters = Masters(reducer.parameters, reducer.layout, self._group, self.owners)
        plans = reducer.layout.buckets
        self._room = [
            torch.zeros(plan.numel, dtype=plan.dtype, pin_memory=plan.device.type == "cuda")
            for plan in plans
        ]
        if self.mine is not None:
            self.mine.place(self.masters)
        return self.masters

    def own(self, optimizer: Optimizer, *, by_age: bool, stepped: Callable[[], None]) -> None:
        """Hold a shard, if this rank is an owner."""
        if self._rank < self.owners:
            self.mine = ServerShard(self.masters, optimizer, by_age=by_age, stepped=stepped)

    def serve(self, world: World, dispatcher: Dispatcher | None) -> None:
        """Answer the other ranks' questions from now on. Every rank calls it."""
        size = self._group.size
        if size > 1:
            self._lines = PeerLines(world.for_messages(), self._group, world.timeout)
            peers = (
                [rank for rank in range(size) if rank != self._rank]
                if self.mine is not None
                else []
            )
            self._serving = Serving(self._lines, peers, dispatcher, self.mine)
        self._world = world
        world.own(self)

    def close(self) -> None:
        """End the threads: every rank tells all others that it asks nothing more."""
        if self._lines is None or self._world.failing:
            return
        for peer in self._others:
            self._lines.say_bye(peer)
        if self._serving is not None:
            self._serving.join()

    def move(self, everyone: Group) -> None:
        """Continue in another group, in which the owners have the same numbers."""
        self._group = everyone
        self.masters.move(everyone)

    # -- questions --------------------------------------------------------------------------------

    def ask(
        self,
        peers: list[int],
        header: list[float],
        leaving: list[list[Tensor]] | None = None,
        arriving: list[list[Tensor]] | None = None,
    ) -> list[list[float]]:
        if not peers:
            return []
        assert self._lines is not None
        nothing: list[list[Tensor]] = [[] for _ in peers]
        status.waits(True, messages=True)
        try:
            answers = self._lines.ask(peers, header, leaving or nothing, arriving or nothing)
        except PeerGone as error:
            raise self.missing(error.rank) from error
        status.waits(False)
        return answers

    def look_after_threads(self) -> None:
        """Raise the error of a thread, if there is one."""
        if self._serving is not None and self._serving.error is not None:
            raise LockstepError(
                "server-shard-failed", error=str(self._serving.error)
            ) from self._serving.error

    def missing(self, rank: int | None) -> LockstepError:
        """Return the error for a lost rank that is needed; None: this rank counts as dead."""
        self.look_after_threads()
        if rank is None:
            return PeerFailed("taken-for-dead")
        held = f"{100 * self.masters.share(rank):.0f} % of the parameters"
        held += " and counted the windows" if rank == 0 else ""
        return PeerFailed("server-rank-gone", rank=rank, held=held)

    def _parts(self, flats: Sequence[Tensor], rank: int) -> list[Tensor]:
        return [
            flat[part.start : part.stop]
            for flat, part in zip(flats, self.masters.of(rank), strict=True)
            if len(part)
        ]

    @torch.no_grad()
    def pull(self, buckets: Sequence[Bucket]) -> None:
        """Copy the newest parameters of every shard into the model's."""
        into = [self._parts(self._room, rank) for rank in self._others]
        versions = [
            (int(header[0]), int(header[1]))
            for header in self.ask(self._others, [PULL], None, into)
        ]
        if self.mine is not None:
            version, steps, tensors = self.mine.pull()
            versions.append((version, steps))
            for mine, tensor in zip(self._parts(self._room, self._rank), tensors, strict=True):
                mine.copy_(tensor)
        self.version, self.steps = min(version for version, _ in versions), versions[0][1]
        laid = [
            each
            for bucket, flat in zip(buckets, self._room, strict=True)
            for each in places(flat, bucket)
        ]
        torch._foreach_copy_([each for _, each, _ in laid], [place for _, _, place in laid])

    def push(self, draw: Draw, weight: float, buckets: Sequence[Bucket]) -> int:
        """Send the gradients of a draw to every shard. Return how many updates have come since the
        parameters were pulled.
        """
        flats = [
            bucket.sum if bucket.sum.device.type == "cpu" else bucket.sum.cpu()
            for bucket in buckets
        ]
        header = [PUSH, draw.place, draw.number, self.version, weight]
        leaving = [self._parts(flats, rank) for rank in self._others]
        versions = [int(answer[0]) for answer in self.ask(self._others, header, leaving)]
        if self.mine is not None:
            versions.append(
                self.mine.push(
                    draw.place, draw.number, self.version, weight, self._parts(flats, self._rank)
                )
            )
        return max(versions) - self.version

    def squares(self, window: int) -> float:
        """Return the sum of squares of a window's gradient, which is complete."""
        squares = sum(header[0] for header in self.ask(self._others, [SQUARES, window]))
        return squares + (self.mine.squares(window) if self.mine is not None else 0.0)

    def apply(self, window: int, divisor: float, *, skip: bool) -> None:
        """Have every shard step on a window's gradient, or drop it."""
        self.ask(self._others, [APPLY, window, divisor, skip])
        if self.mine is not None:
            self.mine.apply(window, divisor, skip=skip)
