"""Checks whether the ranks compute right: in a share of steps other ranks repeat the computation.

In exact mode a micro-batch has the same gradient on every rank. So a witnessed step is computed
twice from the same weights, buffers, random streams and samples: in one *pass* each rank computes
another rank's share, in the next its own, as usual. Digests are compared, in the order in which an
error spreads:

    micro-batches   samples, weight, every gradient as it lands, buffers: names the rank and slot
    blocks          a rank's partial sums of its share, as they leave for the sum
    reads           these blocks, as they arrive at the ranks that add them
    sums            the sums over all ranks, as each rank received them
    updates         of slices that only one rank updates (updates/repeated.py)

If two computations differ, both are repeated, and with three ranks or more a third rank repeats
them too. This tells which of them was wrong, and whether the error comes back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from lockstep.checks.divergence import Named, digest
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
from lockstep.collectives.schedule import slice_of
from lockstep.data.device import tensors_in
from lockstep.data.windows import Window
from lockstep.errors import CorruptResult, LockstepError, UsageError
from lockstep.gradients.bucket import Bucket
from lockstep.gradients.exact import TreeFold
from lockstep.gradients.facts import Facts
from lockstep.gradients.reducer import Reducer
from lockstep.runtime import randomness

_PLACE = "for the witness"
_MICRO_BATCH, _BLOCK, _READ, _SUM, _UPDATE = range(5)
_FROM, _TURN = range(2)  # what is drawn: a step of a stretch, or how far a step's shares turn
_ROUNDING = 1e-9
_ALL = -1  # instead of an owner: a value that no rank adds up alone
NOT_DETERMINISTIC = "micro-batch-not-deterministic"

Item = tuple[int, int, str, int]
"""A compared value: its level, place, name and digest. The place is a slot; a block's first slot;
for a read, first slot * ranks + reading rank; or the rank that owns a slice.
"""


def of_update(owner: int, digests: Iterable[tuple[str, int]]) -> list[Item]:
    """Return the items for the values to which an owner's slices were updated."""
    return [(_UPDATE, owner, name, found) for name, found in digests]


class Computed:
    """The results of one rank in one pass over a step. `turned` is how many ranks further on
    the rank is whose share it computed; 0 is its own share.
    """

    def __init__(self, turned: int, reducer: Reducer) -> None:
        self.turned, self._reducer = turned, reducer
        fold = reducer.fold
        assert isinstance(fold, TreeFold)
        self._fold, self._reduction = fold, fold.reduction
        self.items: list[Item] = []
        self._slot = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Note the gradients that land and leave in this block."""
        reducer, reduction = self._reducer, self._reduction
        before = reducer.on_ready  # sees only the gradients of the usual pass

        def landed(number: int, gradient: Tensor) -> None:
            self._note(_MICRO_BATCH, self._slot, reducer.names[number], digest([gradient]))
            if before is not None and not self.turned:
                before(number, gradient)

        reducer.on_ready, reducer.on_launch, reduction.on_read = landed, self._left, self._read
        try:
            yield
        finally:
            reducer.on_ready, reducer.on_launch, reduction.on_read = before, None, None

    def open(self, slot: int, batch: Any) -> None:
        """Begin a micro-batch."""
        self._slot = slot
        self._note(_MICRO_BATCH, slot, "its samples", digest(tensors_in(batch)))

    def shut(self, weight: float | Tensor, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """End a micro-batch, which leaves the buffers with these values."""
        self._note(_MICRO_BATCH, self._slot, "its weight", _number(float(weight)))
        for name, buffer in buffers:
            self._note(_MICRO_BATCH, self._slot, name, digest([buffer]))

    def _left(self, bucket: Bucket) -> None:
        for slot, number, block in self._fold.blocks(bucket):
            self._note(_BLOCK, slot, self._reducer.names[number], digest([block]))

    def _read(self, bucket: Bucket, pieces: Sequence[Tensor]) -> None:
        rank, size = self._reducer.group.rank, self._reducer.group.size
        blocks = [block for each in self._reduction.brought for block in each]
        for block, piece in zip(blocks, pieces, strict=True):
            for name, start, stop in self._spans(bucket, rank):
                place = block.first * size + rank
                self._note(_READ, place, name, _digest(piece[start:stop]))

    def summed(self, facts: Facts, moved: Tensor) -> None:
        """Note the sums when they have arrived, the step's facts, and the movements of buffers."""
        group = self._reducer.group
        for name, value in (("the weight", facts.weight), ("the loss", facts.loss)):
            self._note(_SUM, _ALL, name, _number(value))
        self._note(_SUM, _ALL, "the buffers", _digest(moved))
        for bucket in self._reducer.buckets:
            for owner in (group.rank,) if self._reduction.scattered else range(group.size):
                part = slice_of(bucket.sum.numel(), owner, group.size)
                flat = bucket.sum.data[part.start : part.stop]
                for name, start, stop in self._spans(bucket, owner):
                    self._note(_SUM, owner, name, _digest(flat[start:stop]))

    def _spans(self, bucket: Bucket, owner: int) -> Iterator[tuple[str, int, int]]:
        """Yield the part of each parameter in a rank's slice of a bucket: its name, start and stop,
        counted from the begin of the slice.
        """
        part = slice_of(bucket.sum.numel(), owner, self._reducer.group.size)
        for span in bucket.spans:
            start, stop = max(part.start, span.start), min(part.stop, span.stop)
            if start < stop:
                yield span.name, start - part.start, stop - part.start

    def _note(self, level: int, place: int, name: str, found: int) -> None:
        self.items.append((level, place, name, found))

    def row(self, slots: int) -> list[int]:
        """Return a number for each slot, for the block that begins with it, for what each rank
        reads, for what each rank adds up, and for what no rank adds up alone. 0: not computed here.
        """
        size = self._reducer.group.size
        hashers = [xxhash.xxh3_64() for _ in range(2 * (slots + size) + 1)]
        begins, computed = (0, slots, 2 * slots, 2 * slots + size), set()
        for level, place, _, found in sorted(self.items):  # reads come rank by rank
            place = place % size if level == _READ else place
            number = begins[level] + place if place != _ALL else len(hashers) - 1
            hashers[number].update(found.to_bytes(8, "little", signed=True))
            computed.add(number)
        return [
            each.intdigest() >> 1 if number in computed else 0
            for number, each in enumerate(hashers)
        ]


class Witness:
    """Decides which steps are witnessed, and compares. Every rank makes it and calls it alike."""

    def __init__(self, share: float, seed: int, group: Group) -> None:
        if group.size == 1:
            raise UsageError("witness-alone", witness=share)
        self._share, self._seed, self._group = share, seed, group
        self.witnessed: int | None = None
        """How many steps had been taken when all ranks last agreed; None before."""
        self.on_divergence: list[Callable[[int | None], str]] = []
        """Called with `witnessed` on all ranks before the error is raised. The strings that they
        return are added to its message.
        """
        self._step, self._slots = 0, 0
        self._records: list[Computed] = []
        # tensors at the end of a witnessed step, each with its version counter and digest
        self._kept: dict[str, tuple[Tensor, int, int]] = {}
        self._kept_after = -1

    @classmethod
    def of(cls, share: float, seed: int, group: Group) -> Witness | None:
        """Return a Witness, or None for a share of 0. Raises UsageError if there is one rank."""
        return cls(share, seed, group) if share else None

    def keep(self, named: Named, steps: int) -> None:
        """Keep digests of these tensors at the end of a witnessed step, after `steps` steps."""
        self._kept_after = steps
        self._kept = {name: (each, each._version, digest([each])) for name, each in named}

    def at_rest(self, steps: int) -> None:
        """Before a witnessed step right after another one: check for changes since then that no
        code has made. Raises CorruptResult on all ranks if some ranks, but not all, find changes.
        """
        kept, self._kept = self._kept, {}
        if steps != self._kept_after:
            return
        changed = [
            name
            for name, (each, version, found) in kept.items()
            if each._version == version and digest([each]) != found
        ]
        host = self._group.host
        counts = host.all_gather(torch.tensor([len(changed)]), place=_PLACE).tolist()
        ranks = [rank for rank, count in enumerate(counts) if count]
        if 0 < len(ranks) < self._group.size:  # on all ranks: code wrote past the version counters
            names = everybodys(changed, host, _PLACE)[ranks[0]]
            values = {"step": steps + 1, "last": steps, "where": listed(ranks), "told": ""}
            raise self.told(
                CorruptResult("corrupt-at-rest", parameter=names[0], ranks=ranks, **values)
            )

    def due(self, window: Window) -> bool:
        """Whether the window's step is witnessed. Raises UsageError if no other rank can read the
        window.
        """
        if window.read is None:
            raise UsageError("witness-cannot-read", kind=type(window).__name__)
        # one step of each stretch of 1 / share consecutive steps
        stretch = math.floor(window.step * self._share + _ROUNDING)
        begin, end = (
            math.ceil((each - _ROUNDING) / self._share) for each in (stretch, stretch + 1)
        )
        return window.step == begin + self._drawn(_FROM, stretch) % (end - begin)

    def _drawn(self, what: int, number: int) -> int:
        return randomness.derive(self._seed, randomness.WITNESS, what, number)

    def begin(self, window: Window) -> int:
        """Begin a witnessed step. Return how far shares are turned in the pass before the usual."""
        self._step, self._slots, self._records = window.step, window.cut.slots, []
        return 1 + self._drawn(_TURN, self._step) % (self._group.size - 1)

    def again(self) -> list[int]:
        """Return the passes to repeat: both, and one on third ranks if there are any."""
        turned = self._records[0].turned
        others = [each for each in range(1, self._group.size) if each != turned]
        return [turned, 0, *others[:1]]

    def record(self, turned: int, reducer: Reducer) -> Computed:
        """Return the record for a pass that begins."""
        self._records.append(Computed(turned, reducer))
        return self._records[-1]

    def agree(self, steps: int) -> bool:
        """Whether both passes have the same results on all ranks, after `steps` steps. A
        collective.
        """
        rows = [each.row(self._slots) for each in self._records]
        table = self._group.host.all_gather(torch.tensor(rows), place=_PLACE)
        # [number, rank and pass]
        found = table.view(-1, len(rows[0])).t().tolist()
        if any(len(set(each) - {0}) > 1 for each in found):
            return False
        self.witnessed = steps
        return True

    def error(self) -> LockstepError:
        """Return the error that follows from all passes. A collective."""
        return self.told(self._judged([each.items for each in self._records]) or _nothing())

    def compare(
        self, passes: Sequence[list[Item]], once_more: Callable[[], Iterable[list[Item]]]
    ) -> None:
        """Raise CorruptResult, on all ranks, if these passes of all ranks differ. `once_more` makes
        further passes, which tell who was wrong. A collective.
        """
        if self._judged(passes) is not None:
            raise self.told(self._judged([*passes, *once_more()]) or _nothing())

    def _judged(self, passes: Sequence[list[Item]]) -> LockstepError | None:
        said = everybodys(passes, self._group.host, _PLACE)
        by_pass = [[mine[number] for mine in said] for number in range(len(passes))]
        return judge(by_pass, self._step + 1)

    def told(self, error: LockstepError) -> LockstepError:
        """Add to an error of corruption what the functions in `on_divergence` return."""
        if isinstance(error, CorruptResult):
            told = [text for each in self.on_divergence if (text := each(self.witnessed))]
            error.values["told"] = "".join(f" {text}" for text in told)
        return error


def _nothing() -> LockstepError:
    raise AssertionError("passes differ, and nothing in them does")


def judge(passes: Sequence[Sequence[Sequence[Item]]], step: int) -> LockstepError | None:
    """Return the error that says who was wrong in this step, or None. `passes[i][rank]` is what a
    rank computed in pass i.
    """
    for level in range(_UPDATE + 1):
        found: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
        for number, ranks in enumerate(passes):
            for rank, items in enumerate(ranks):
                for its, place, name, value in items:
                    if its == level:
                        found.setdefault((place, name), []).append((number, rank, value))
        differing = {
            key: each for key, each in found.items() if len({value for *_, value in each}) > 1
        }
        if differing:
            if level == _READ:
                code, values = _of_reads(differing, passes)
            else:
                code, values = (
                    _of_sums(differing) if level == _SUM else _of_shares(level, differing)
                )
            kind = UsageError if code == NOT_DETERMINISTIC else CorruptResult
            return kind(code, step=step, **values)
    return None


Differing = dict[tuple[int, str], list[tuple[int, int, int]]]
"""By place and name, the computations of one value: pass, rank, digest."""


def _of_shares(level: int, differing: Differing) -> tuple[str, dict[str, Any]]:
    """Judge a level at which all ranks that compute a share must have the same results."""
    varying = {
        rank
        for each in differing.values()
        for rank in {rank for _, rank, _ in each}
        if len({value for _, its, value in each if its == rank}) > 1
    }
    wrong = _wrong(differing)
    suspects = varying or {rank for _, _, rank in wrong}
    own = [(key, number) for key, number, rank in wrong if {rank} == suspects]
    if not own:
        (place, name), each = next(iter(differing.items()))
        ranks = sorted({rank for _, rank, _ in each})
        return (NOT_DETERMINISTIC if varying else "ranks-compute-differently"), _told(
            place, name, ranks, set()
        )
    (place, name), _ = own[0]
    code = {_MICRO_BATCH: "corrupt-micro-batch", _BLOCK: "corrupt-share"}.get(
        level, "corrupt-update"
    )
    return code, _told(place, name, sorted(suspects), {number for _, number in own})


def _of_reads(
    differing: Differing, passes: Sequence[Sequence[Sequence[Item]]]
) -> tuple[str, dict[str, Any]]:
    """Judge blocks that left their rank right, but arrived wrong at the rank that reads them."""
    wrong = _wrong(differing) or [
        (key, number, rank) for key, each in differing.items() for number, rank, _ in each
    ]
    (place, name), number, reader = wrong[0]
    slot, ranks = place // len(passes[0]), passes[number]
    left = (_BLOCK, slot, name)
    sender = next(
        rank for rank, items in enumerate(ranks) if any(tuple(e[:3]) == left for e in items)
    )
    found = _told(slot, name, [sender], {number for _, number, _ in wrong})
    return "corrupt-on-its-way", found | {"reader": reader}


def _of_sums(differing: Differing) -> tuple[str, dict[str, Any]]:
    """Judge sums, which all ranks must receive alike. If no rank received a sum right, its owner
    has added it up wrong.
    """
    wrong = _wrong(differing)
    if not wrong:  # no digest is the most frequent
        wrong = [(key, number, rank) for key, each in differing.items() for number, rank, _ in each]
    key, number, _ = wrong[0]
    owner, name = key
    received = sorted({rank for its, when, rank in wrong if (its, when) == (key, number)})
    passes = {number for _, number, _ in wrong}
    if owner != _ALL and received == sorted({r for when, r, _ in differing[key] if when == number}):
        return "corrupt-sum", _told(owner, name, [owner], passes)
    return "corrupt-message", _told(owner, name, received, passes)


def _told(place: int, name: str, ranks: list[int], passes: set[int]) -> dict[str, Any]:
    """Return the values of the error. `passes` are those that went wrong."""
    back = "comes back" if len(passes) > 1 else "does not come back"
    return {
        "slot": place,
        "parameter": name,
        "ranks": ranks,
        "where": listed(ranks),
        "back": back,
        "told": "",
    }


def _wrong(differing: Differing) -> list[tuple[tuple[int, str], int, int]]:
    """Return place and name, pass, and rank of each result that differs from the most frequent one.
    A value without a single most frequent result is left out.
    """
    found = []
    for key, each in differing.items():
        right, votes = Counter(value for *_, value in each).most_common(1)[0]
        if 2 * votes > len(each) or Counter(Counter(v for *_, v in each).values())[votes] == 1:
            found += [(key, number, rank) for number, rank, value in each if value != right]
    return found


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, and their values, after the block."""
    before = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for where, name, buffer, value in before:
                where[name] = buffer
                if buffer.shape == value.shape:  # a cache has another shape
                    buffer.copy_(value)


def _number(value: float) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode()) >> 1


def _digest(tensor: Tensor) -> int:
    """Return the `digest` of a sum, with all nans alike: which nan a sum is depends on the order of
    addition.
    """
    odd = tensor.isnan()
    return digest([tensor.masked_fill(odd, torch.nan) if bool(odd.any()) else tensor])
