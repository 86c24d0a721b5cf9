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
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from lockstep.checks.divergence import Named, digest, sentences
from lockstep.collectives.addition_order import slice_of
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.fingerprints import listed
from lockstep.collectives.group import Group
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
"""A compared value: its level, position, name and digest. The position is a slot; a block's first
slot; for a read, first slot * ranks + reading rank; or the rank that owns a slice.
"""


def update_items(owner: int, digests: Iterable[tuple[str, int]]) -> list[Item]:
    """Return the items for the values to which an owner's slices were updated."""
    return [(_UPDATE, owner, name, value) for name, value in digests]


class Computed:
    """The results of one rank in one pass over a step. `turned` is how many ranks further on
    the rank is whose share it computed; 0 is its own share.
    """

    def __init__(self, turned: int, reducer: Reducer) -> None:
        fold = reducer.fold
        assert isinstance(fold, TreeFold)
        self.turned = turned
        self._reducer = reducer
        self._group = reducer.group
        self._fold = fold
        self._reduction = fold.reduction
        self.items: list[Item] = []
        self._slot = 0

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Note the gradients that land and leave in this block."""
        reducer = self._reducer
        reduction = self._reduction
        before = reducer.on_ready  # sees only the gradients of the usual pass

        def landed(number: int, gradient: Tensor) -> None:
            self._add(_MICRO_BATCH, self._slot, reducer.names[number], digest([gradient]))
            if before is not None and not self.turned:
                before(number, gradient)

        reducer.on_ready = landed
        reducer.on_launch = self._add_blocks
        reduction.on_read = self._add_reads
        try:
            yield
        finally:
            reducer.on_ready = before
            reducer.on_launch = None
            reduction.on_read = None

    def open(self, slot: int, batch: Any) -> None:
        """Begin a micro-batch."""
        self._slot = slot
        self._add(_MICRO_BATCH, slot, "its samples", digest(tensors_in(batch)))

    def shut(self, weight: float | Tensor, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """End a micro-batch, which leaves the buffers with these values."""
        self._add(_MICRO_BATCH, self._slot, "its weight", _number(float(weight)))
        for name, buffer in buffers:
            self._add(_MICRO_BATCH, self._slot, name, digest([buffer]))

    def _add_blocks(self, bucket: Bucket) -> None:
        for slot, number, block in self._fold.blocks(bucket):
            self._add(_BLOCK, slot, self._reducer.names[number], digest([block]))

    def _add_reads(self, bucket: Bucket, pieces: Sequence[Tensor]) -> None:
        rank = self._group.rank
        size = self._group.size
        blocks = chain.from_iterable(self._reduction.brought)
        for block, piece in zip(blocks, pieces, strict=True):
            position = block.first * size + rank
            for name, start, stop in self._spans(bucket, rank):
                self._add(_READ, position, name, _digest(piece[start:stop]))

    def summed(self, facts: Facts, moved: Tensor) -> None:
        """Note the sums when they have arrived, the step's facts, and the movements of buffers."""
        group = self._group
        self._add(_SUM, _ALL, "the weight", _number(facts.weight))
        self._add(_SUM, _ALL, "the loss", _number(facts.loss))
        self._add(_SUM, _ALL, "the buffers", _digest(moved))
        owners = [group.rank] if self._reduction.scattered else range(group.size)
        for bucket in self._reducer.buckets:
            for owner in owners:
                part = slice_of(bucket.sum.numel(), owner, group.size)
                flat = bucket.sum.data[part.start : part.stop]
                for name, start, stop in self._spans(bucket, owner):
                    self._add(_SUM, owner, name, _digest(flat[start:stop]))

    def _spans(self, bucket: Bucket, owner: int) -> Iterator[tuple[str, int, int]]:
        """Yield the part of each parameter in a rank's slice of a bucket: its name, start and stop,
        counted from the begin of the slice.
        """
        part = slice_of(bucket.sum.numel(), owner, self._group.size)
        for span in bucket.spans:
            start = max(part.start, span.start) - part.start
            stop = min(part.stop, span.stop) - part.start
            if start < stop:
                yield span.name, start, stop

    def _add(self, level: int, position: int, name: str, value: int) -> None:
        self.items.append((level, position, name, value))

    def row(self, slots: int) -> list[int]:
        """Return a number for each slot, for the block that begins with it, for what each rank
        reads, for what each rank adds up, and for what no rank adds up alone. 0: not computed here.
        """
        size = self._group.size
        begins = (0, slots, 2 * slots, 2 * slots + size)  # by level
        row = [0] * (2 * (slots + size) + 1)
        hashers: dict[int, Any] = defaultdict(xxhash.xxh3_64)
        for level, position, _, value in sorted(self.items):  # reads come rank by rank
            if level == _READ:
                position %= size
            index = len(row) - 1 if position == _ALL else begins[level] + position
            hashers[index].update(value.to_bytes(8, "little", signed=True))
        for index, hasher in hashers.items():
            row[index] = hasher.intdigest() >> 1
        return row


class Witness:
    """Decides which steps are witnessed, and compares. Every rank makes it and calls it alike."""

    def __init__(self, share: float, seed: int, group: Group) -> None:
        if group.size == 1:
            raise UsageError("witness-alone", witness=share)
        self._share = share
        self._seed = seed
        self._group = group
        self.witnessed: int | None = None
        """How many steps had been taken when all ranks last agreed; None before."""
        self.on_divergence: list[Callable[[int | None], str]] = []
        """Called with `witnessed` on all ranks before the error is raised. The strings that they
        return are added to its message.
        """
        self._step = 0
        self._slots = 0
        self._records: list[Computed] = []
        # tensors at the end of a witnessed step, each with its version counter and digest
        self._last: dict[str, tuple[Tensor, int, int]] = {}
        self._last_steps = -1

    @classmethod
    def of(cls, share: float, seed: int, group: Group) -> Witness | None:
        """Return a Witness, or None for a share of 0. Raises UsageError if there is one rank."""
        if share:
            return cls(share, seed, group)
        return None

    def keep(self, named: Named, steps: int) -> None:
        """Keep digests of these tensors at the end of a witnessed step, after `steps` steps."""
        self._last_steps = steps
        self._last = {}
        for name, tensor in named:
            self._last[name] = tensor, tensor._version, digest([tensor])

    def at_rest(self, steps: int) -> None:
        """Before a witnessed step right after another one: check for changes since then that no
        code has made. Raises CorruptResult on all ranks if some ranks, but not all, find changes.
        """
        last, self._last = self._last, {}
        if steps != self._last_steps:
            return
        changed = [
            name
            for name, (tensor, version, value) in last.items()
            if tensor._version == version and digest([tensor]) != value
        ]
        host = self._group.host
        counts = host.all_gather(torch.tensor([len(changed)]), place=_PLACE).tolist()
        ranks = [rank for rank, count in enumerate(counts) if count]
        if 0 < len(ranks) < self._group.size:  # on all ranks: code wrote past the version counters
            names = everybodys(changed, host, _PLACE)[ranks[0]]
            raise CorruptResult(
                "corrupt-at-rest",
                parameter=names[0],
                ranks=ranks,
                step=steps + 1,
                last=steps,
                where=listed(ranks),
                told=sentences(self.on_divergence, self.witnessed),
            )

    def due(self, window: Window) -> bool:
        """Whether the window's step is witnessed. Raises UsageError if no other rank can read the
        window.
        """
        if window.read is None:
            raise UsageError("witness-cannot-read", kind=type(window).__name__)
        # one step of each stretch of 1 / share consecutive steps
        stretch = math.floor(window.step * self._share + _ROUNDING)
        begin = math.ceil((stretch - _ROUNDING) / self._share)
        end = math.ceil((stretch + 1 - _ROUNDING) / self._share)
        return window.step == begin + self._drawn(_FROM, stretch) % (end - begin)

    def _drawn(self, purpose: int, number: int) -> int:
        return randomness.derive(self._seed, randomness.WITNESS, purpose, number)

    def begin(self, window: Window) -> int:
        """Begin a witnessed step. Return how far shares are turned in the pass before the usual."""
        self._step = window.step
        self._slots = window.cut.slots
        self._records = []
        return 1 + self._drawn(_TURN, self._step) % (self._group.size - 1)

    def again(self) -> list[int]:
        """Return the passes to repeat: both, and one on third ranks if there are any."""
        turned = self._records[0].turned
        others = [other for other in range(1, self._group.size) if other != turned]
        return [turned, 0, *others[:1]]

    def record(self, turned: int, reducer: Reducer) -> Computed:
        """Return the record for a pass that begins."""
        self._records.append(Computed(turned, reducer))
        return self._records[-1]

    def agree(self, steps: int) -> bool:
        """Whether both passes have the same results on all ranks, after `steps` steps. A
        collective.
        """
        rows = [record.row(self._slots) for record in self._records]
        table = self._group.host.all_gather(torch.tensor(rows), place=_PLACE)
        # [number, rank and pass]
        numbers = table.view(-1, len(rows[0])).t().tolist()
        if any(len(set(values) - {0}) > 1 for values in numbers):
            return False
        self.witnessed = steps
        return True

    def error(self) -> LockstepError:
        """Return the error that follows from all passes. A collective."""
        return self._error([record.items for record in self._records])

    def compare(
        self, passes: Sequence[list[Item]], once_more: Callable[[], Iterable[list[Item]]]
    ) -> None:
        """Raise CorruptResult, on all ranks, if these passes of all ranks differ. `once_more` makes
        further passes, which tell who was wrong. A collective.
        """
        if self._judged(passes) is not None:
            raise self._error([*passes, *once_more()])

    def _error(self, passes: Sequence[list[Item]]) -> LockstepError:
        error = self._judged(passes)
        if error is None:
            raise AssertionError("passes differ, and nothing in them does")
        if isinstance(error, CorruptResult):
            error.values["told"] = sentences(self.on_divergence, self.witnessed)
        return error

    def _judged(self, passes: Sequence[list[Item]]) -> LockstepError | None:
        by_rank = everybodys(passes, self._group.host, _PLACE)
        by_pass = list(zip(*by_rank, strict=True))
        return judge(by_pass, self._step + 1)


class _Result(NamedTuple):
    """One computation of a value: in which pass, on which rank, and its digest."""

    number: int
    rank: int
    digest: int


Key = tuple[int, str]
"""The position and name of a value."""
Passes = Sequence[Sequence[Sequence[Item]]]
"""`passes[i][rank]` is what a rank computed in pass i."""
Differing = dict[Key, list[_Result]]
"""All computations of the values that differ."""


def judge(passes: Passes, step: int) -> LockstepError | None:
    """Return the error that says who was wrong in this step, or None."""
    for level in range(_UPDATE + 1):
        differing = _differing(passes, level)
        if not differing:
            continue
        if level == _READ:
            code, values = _of_reads(differing, passes)
        elif level == _SUM:
            code, values = _of_sums(differing)
        else:
            code, values = _of_shares(level, differing)
        kind = UsageError if code == NOT_DETERMINISTIC else CorruptResult
        return kind(code, step=step, **values)
    return None


def _differing(passes: Passes, level: int) -> Differing:
    values: Differing = defaultdict(list)
    for number, ranks in enumerate(passes):
        for rank, items in enumerate(ranks):
            for item_level, position, name, value in items:
                if item_level == level:
                    values[position, name].append(_Result(number, rank, value))
    differing = {}
    for key, results in values.items():
        if any(result.digest != results[0].digest for result in results):
            differing[key] = results
    return differing


def _of_shares(level: int, differing: Differing) -> tuple[str, dict[str, Any]]:
    """Judge a level at which all ranks that compute a share must have the same results."""
    varying = set()  # the ranks that differ from themselves
    for results in differing.values():
        digests: dict[int, int] = {}
        for result in results:
            if digests.setdefault(result.rank, result.digest) != result.digest:
                varying.add(result.rank)
    wrong = _wrong(differing)
    suspects = varying or {result.rank for _, result in wrong}
    own = [(key, result) for key, result in wrong if {result.rank} == suspects]
    if not own:
        key, results = next(iter(differing.items()))
        code = NOT_DETERMINISTIC if varying else "ranks-compute-differently"
        return code, _error_values(key, {result.rank for result in results}, [])
    code = {_MICRO_BATCH: "corrupt-micro-batch", _BLOCK: "corrupt-share"}.get(
        level, "corrupt-update"
    )
    key, _ = own[0]
    return code, _error_values(key, suspects, own)


def _of_reads(differing: Differing, passes: Passes) -> tuple[str, dict[str, Any]]:
    """Judge blocks that left their rank right, but arrived wrong at the rank that reads them."""
    wrong = _wrong(differing) or _all_results(differing)
    (position, name), result = wrong[0]
    slot = position // len(passes[0])
    senders = set()
    for rank, items in enumerate(passes[result.number]):
        if [_BLOCK, slot, name] in [list(item[:3]) for item in items]:
            senders.add(rank)
    values = _error_values((slot, name), senders, wrong)
    return "corrupt-on-its-way", values | {"reader": result.rank}


def _of_sums(differing: Differing) -> tuple[str, dict[str, Any]]:
    """Judge sums, which all ranks must receive alike. If no rank received a sum right, its owner
    has added it up wrong.
    """
    # no digest may be the most frequent
    wrong = _wrong(differing) or _all_results(differing)
    key, first = wrong[0]
    same_pass = [result for result in differing[key] if result.number == first.number]
    received = {result.rank for result in same_pass if (key, result) in wrong}
    owner, _ = key
    if owner != _ALL and received == {result.rank for result in same_pass}:
        return "corrupt-sum", _error_values(key, {owner}, wrong)
    return "corrupt-message", _error_values(key, received, wrong)


def _error_values(
    key: Key, ranks: Collection[int], wrong: Sequence[tuple[Key, _Result]]
) -> dict[str, Any]:
    """Return the values of the error about the value `key`, computed wrong by `ranks`."""
    position, name = key
    passes = {result.number for _, result in wrong}
    return {
        "slot": position,
        "parameter": name,
        "ranks": sorted(ranks),
        "where": listed(sorted(ranks)),
        "back": "comes back" if len(passes) > 1 else "does not come back",
        "told": "",
    }


def _wrong(differing: Differing) -> list[tuple[Key, _Result]]:
    """Return each result that differs from the most frequent one. A value without a single most
    frequent result is left out.
    """
    wrong = []
    for key, results in differing.items():
        counts = Counter(result.digest for result in results)
        right, votes = counts.most_common(1)[0]
        if list(counts.values()).count(votes) == 1:
            wrong += [(key, result) for result in results if result.digest != right]
    return wrong


def _all_results(differing: Differing) -> list[tuple[Key, _Result]]:
    pairs = []
    for key, results in differing.items():
        pairs += [(key, result) for result in results]
    return pairs


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, and their values, after the block."""
    before = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                before.append((module, name, buffer, buffer.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                module._buffers[name] = buffer
                if buffer.shape == value.shape:  # a cache has another shape
                    buffer.copy_(value)


def _number(value: float) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode()) >> 1


def _digest(tensor: Tensor) -> int:
    """Return the `digest` of a sum, with all nans alike: which nan a sum is depends on the order of
    addition.
    """
    nans = tensor.isnan()
    if bool(nans.any()):
        tensor = tensor.masked_fill(nans, torch.nan)
    return digest([tensor])
