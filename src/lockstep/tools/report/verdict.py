"""The verdict on a training: sentences that say what to do and where the time went.

    Use --loader-workers 2: about 17 % faster.
    4 ranks: 71 % efficient. Lost 29 %: 19 % waiting for rank 3 (its loader: 212 ms a step, others
    11), 7 % exposed all-reduce, 3 % other.

The efficiency is the fraction of all ranks' time in forward, backward and optimizer. The rest is
lost: to waits for ranks that arrive later, to exposed communication, to loaders, checks and other
code between two steps. Over TCP a ring is as slow as its slowest link; the kernel's figures of each
connection show which link that is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from lockstep.config.settings import Settings
from lockstep.data.windows import counted
from lockstep.tools.report.judged import Judged, judged, milliseconds, percentages, ranks
from lockstep.tools.report.remedies import (
    LEAST,
    MOST,
    UNKNOWN,
    Advice,
    Straggler,
    advice,
    crowded,
    gained,
    next_straggler,
    stragglers,
)
from lockstep.training.timeline import Anatomy, Generation, LinkUse

_USEFUL = ("forward", "backward", "optimizer")
_LARGE = 0.1
"""Pauses are mentioned from this fraction of the whole time on."""
_PAUSES = {"evaluate": "evaluations", "checkpoint": "checkpoints"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A lost fraction of all ranks' time, and its cause in words."""

    share: float
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on the longest stretch without a restart."""

    ranks: int
    first: int
    last: int
    """The last of the judged steps; `first` is the first."""
    efficiency: float
    lost: tuple[Loss, ...]
    """The losses, the largest first. Small ones are summed under "other", which comes last; all add
    up to 1 - efficiency.
    """
    stragglers: tuple[Straggler, ...]
    slow_link: SlowLink | None
    advice: tuple[Advice, ...]
    find_out: tuple[str, ...]
    """Sentences on slow ranks and networks that no option fixes."""
    notes: tuple[str, ...]
    """Sentences that the reader needs to interpret the figures."""

    def actions(self) -> list[str]:
        """Say what to do: at most three sentences, each with its gain."""
        same = [str(each) for each in self.advice if not each.changes]
        other = [str(each) for each in self.advice if each.changes]
        return [*same, *self.find_out, *other][:MOST] or [
            "Change nothing: no option is expected to gain 5 % or more."
        ]

    def shares(self) -> list[tuple[int, str]]:
        """Return whole per cents of all ranks' time that add up to 100: the efficient part first,
        then each loss.
        """
        useful, *parts = percentages([self.efficiency, *(each.share for each in self.lost)])
        lost = [(part, each.what) for part, each in zip(parts, self.lost, strict=True) if part]
        return [(useful, "forward, backward and optimizer"), *lost]

    def reasons(self) -> list[str]:
        """Say in one sentence where the time went, then each note."""
        (efficient, _), *lost = self.shares()
        first = f"{counted(self.ranks, 'rank')}: {efficient} % efficient."
        if lost:
            told = ", ".join(f"{share} % {what}" for share, what in lost)
            first += f" Lost {100 - efficient} %: {told}."
        return [first, *self.notes]

    def sentences(self) -> list[str]:
        """Return the actions, then the reasons."""
        return [*self.actions(), *self.reasons()]

    def as_json(self) -> dict[str, Any]:
        told = {"actions": self.actions(), "reasons": self.reasons()}
        return {**asdict(self), **told, "sentences": self.sentences()}


def verdict(anatomy: Anatomy, settings: Settings | None = None) -> Verdict | None:
    """Return the verdict; None if no step was recorded. `settings` are those of the run, so that
    the advice leaves out options in use.
    """
    found = judged(anatomy.longest, None if settings is None else settings.mesh)
    if found is None:
        return None
    behind = stragglers(found)
    slow = slow_link(found.generation)
    options = advice(found, behind, settings)
    efficiency = found.total(*_USEFUL) / found.seconds if found.total("seconds") else 1.0
    return Verdict(
        ranks=found.generation.workers,
        first=found.first,
        last=found.last,
        efficiency=efficiency,
        lost=_losses(found, behind, slow, 1 - efficiency),
        stragglers=tuple(behind),
        slow_link=slow,
        advice=tuple(options),
        find_out=tuple(_find_out(found, behind, slow, options)),
        notes=tuple(_notes(anatomy, found, next_straggler(found, behind))),
    )


def _losses(
    found: Judged, behind: Sequence[Straggler], slow: SlowLink | None, whole: float
) -> tuple[Loss, ...]:
    waited = sum(found.lost_to.values())
    in_turn = waited / found.seconds - sum(each.share for each in behind)
    every = [
        *(Loss(share=each.share, what=f"waiting for {each.named(found)}") for each in behind),
        Loss(share=in_turn, what=_in_turn(found, bool(behind))),
        Loss(share=(found.total("exposed") - waited) / found.seconds, what=_exposed(found, slow)),
        Loss(share=found.total("data") / found.seconds, what=_data(found, behind)),
        Loss(share=found.total("checks") / found.seconds, what="checks"),
    ]
    told = sorted((each for each in every if each.share >= LEAST), key=lambda each: -each.share)
    rest = whole - sum(each.share for each in told)
    return (*told, Loss(share=rest, what="other")) if rest > 0 else tuple(told)


def _find_out(
    found: Judged, behind: Sequence[Straggler], slow: SlowLink | None, options: Sequence[Advice]
) -> Iterator[str]:
    """Yield sentences on what no option of Lockstep fixes. They name no rank if ranks share cores,
    because then it is chance which one is slow, and none after a single step.
    """
    if slow is not None:
        yield f"Look at {slow.named()} ({UNKNOWN})."
    mended = {"work"} | ({"network"} if slow else set())
    if any(each.option.startswith("--loader-workers") for each in options):
        mended |= {"data"}
    for each in behind if found.first < found.last and not crowded(found) else ():
        if each.cause not in mended:
            waits = min(0.99, each.share * len(found.places) / (len(found.places) - 1))
            gain = gained(waits / (1 - waits), "up to")
            yield f"Find out why {found.name(each.place)} is slow ({each.why(found)}): {gain}."


def _in_turn(found: Judged, some: bool) -> str:
    """Name the waiting that no single rank causes. `some` says whether stragglers are named."""
    spreads = [each.spread for each in found.places.values() if each.spread is not None]
    varies = f" (step times vary by {100 * statistics.fmean(spreads):.0f} %)" if spreads else ""
    return f"waiting for {'another' if some else 'a different'} rank in each step{varies}"


def _exposed(found: Judged, slow: SlowLink | None) -> str:
    """Name the exposed communication of the method."""
    method = found.begin.method
    if method.startswith("server"):
        return "exchange with the server"
    if found.generation.workers == 1:
        return "between backward and optimizer"
    kinds = {
        "local": "averaging the replicas",
        "sharded": "exposed reduce-scatter and all-gather",
    }
    what = next(
        (words for begin, words in kinds.items() if method.startswith(begin)), "exposed all-reduce"
    )
    return what if slow is None else f"{what}, slowed by {slow.named()}"


def _data(found: Judged, behind: Sequence[Straggler]) -> str:
    """Return `waiting for data (11 ms a step)`, or name the straggler whose loader is slow."""
    for each in behind:
        if each.cause == "data":
            return (
                f"waiting for data ({found.name(each.place)}: {milliseconds(each.mine)} ms a step)"
            )
    mean = statistics.fmean(each.each("data") for each in found.places.values())
    return f"waiting for data ({milliseconds(mean)} ms a step)"


def _notes(anatomy: Anatomy, found: Judged, then: Straggler | None) -> Iterator[str]:
    """Yield sentences that the reader needs to interpret the figures. `then` is the next
    straggler.
    """
    generation = found.generation
    if found.first == found.last:
        yield (
            f"Only step {found.first} was recorded: one step is too few to judge, and a first step"
            " also warms up."
        )
    if len(anatomy.generations) > 1:
        yield (
            f"The training was started {len(anatomy.generations)} times. The figures are of the"
            f" longest stretch: steps {found.first} to {found.last}, on"
            f" {counted(generation.workers, 'rank')}."
        )
    if generation.missing:
        left = ranks(generation.missing)
        yield (
            f"{left.capitalize()} of {generation.workers} left no record: the figures are of the"
            " others."
        )
    if anatomy.unread:
        lines = sum(anatomy.unread.values())
        are = "are" if lines > 1 else "is"
        yield (
            f"{counted(lines, 'line')} of {ranks(sorted(anatomy.unread))} could not be read and"
            f" {are} left out."
        )
    if found.alone and generation.workers > 1:
        yield f"Ranks do not wait for each other in a step ({found.begin.method})."
    for host, (count, threads, cores) in crowded(found).items():
        of = "" if threads == 1 else f" of {threads} threads each"
        yield (
            f"{counted(count, 'rank')}{of} share the {counted(cores, 'core')} of {host}, and slow"
            " each other down. Which rank the others wait for is then mostly chance."
        )
    if then is not None:
        yield f"The next slowest is {then.named(found)}."
    yield from _uneven_work(found)
    yield from _pauses(generation)


def _uneven_work(found: Judged) -> Iterator[str]:
    """Say so if the micro-batches do not divide evenly among the ranks."""
    begin, count = found.begin, len(found.places)
    pieces = -(-begin.global_batch // begin.micro_batch) if begin.micro_batch else 0
    if count == 1 or found.alone or not pieces % count:
        return
    if pieces < count:
        yield (
            f"There are {counted(pieces, 'micro-batch', 'es')} for {count} ranks:"
            f" {counted(count - pieces, 'rank')} {'have' if count - pieces > 1 else 'has'} none."
        )
        return
    more = next((each for each in range(count + 1, pieces + 1) if not pieces % each), None)
    then = f" With {more} ranks each has {pieces // more}." if more else ""
    yield (
        f"{pieces} micro-batches do not divide by {count} ranks: some ranks have"
        f" {-(-pieces // count)}, some {pieces // count}.{then}"
    )


def _pauses(generation: Generation) -> Iterator[str]:
    """Mention evaluations and checkpoints if they are long. All ranks take part in them, so the
    time of the slowest rank counts.
    """
    kinds = dict.fromkeys(pause.what for lane in generation.lanes.values() for pause in lane.pauses)
    sums = {what: generation.paused(what) for what in kinds}
    whole = generation.seconds + sum(sums.values())
    large = {what: seconds for what, seconds in sums.items() if seconds >= _LARGE * whole}
    if large:
        told = [
            f"{_seconds(seconds)} in {_PAUSES.get(what, what)} ({100 * seconds / whole:.0f} %)"
            for what, seconds in large.items()
        ]
        yield (
            f"Time outside steps is not in these figures: {' and '.join(told)} of"
            f" {_seconds(whole)}."
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


_SLOW = 0.5
"""A connection is slow if its rate is at most this fraction of the next faster one's."""
_LEAST = 2**20
"""The smallest number of bytes that gives a meaningful rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLink:
    """One host whose connections are slow."""

    ranks: tuple[int, ...]
    """The ranks on that host; empty if only its address is known."""
    host: str
    """The host's name or address."""
    towards: str | None
    """The other host, if only the connection between two hosts is slow: its network may be the
    cause as well.
    """
    rate: float
    """Bytes a second while data was in flight: the median of the slow connections."""
    others: float
    """The median rate of the other connections."""

    def named(self) -> str:
        """`rank 3's network towards node-1 (12 MB/s, others 110 MB/s)`."""
        whose = (
            f"{ranks(self.ranks)}'{'s' * (len(self.ranks) == 1)} network"
            if self.ranks
            else f"the network of {self.host}"
        )
        towards = f" towards {self.towards}" if self.towards else ""
        return f"{whose}{towards} ({self.rate / 1e6:.3g} MB/s, others {self.others / 1e6:.3g} MB/s)"


Ends = tuple[str, str]
"""The host that sends and the host that receives; a host without a known name has its address."""


def slow_link(generation: Generation) -> SlowLink | None:
    """Return the host that all slow connections have in common. None if connections are equally
    fast, unknown, or slow on several hosts.
    """
    links: dict[str, list[LinkUse]] = {}
    for lane in generation.lanes.values():
        links.setdefault(lane.begin.host, []).extend(
            link for each in lane.links for link in each.to
        )
    slow, fast = _apart(_rates(links, _names(links, some_are_missing=bool(generation.missing))))
    if not slow:
        return None
    common = _common(slow)
    host, towards = min(slow) if len(common) == 2 else (common.pop(), None)
    return SlowLink(
        ranks=tuple(rank for rank, lane in generation.lanes.items() if lane.begin.host == host),
        host=host,
        towards=towards,
        rate=statistics.median_low(slow.values()),
        others=statistics.median_low(fast.values()),
    )


def _names(hosts: Mapping[str, Sequence[LinkUse]], *, some_are_missing: bool) -> dict[str, str]:
    """Return the host of each address. A host that left no file is named by its address, if all
    other hosts are connected to it.
    """
    found = {link.here: host for host, links in hosts.items() for link in links}
    if some_are_missing and hosts:
        everybodys = set.intersection(*({link.peer for link in links} for links in hosts.values()))
        found |= {address: address for address in everybodys - found.keys()}
    return found


def _rates(hosts: Mapping[str, Sequence[LinkUse]], names: Mapping[str, str]) -> dict[Ends, float]:
    """Return the rates of connections that sent enough. Connections to hosts outside the training,
    such as a store of checkpoints, are left out.
    """
    totals: dict[Ends, tuple[int, float]] = {}
    for host, links in hosts.items():
        for link in links:
            if link.peer in names:
                sent, busy = totals.get((host, names[link.peer]), (0, 0.0))
                totals[host, names[link.peer]] = sent + link.sent, busy + link.busy
    return {
        ends: sent / busy for ends, (sent, busy) in totals.items() if sent >= _LEAST and busy > 0
    }


def _apart(rates: Mapping[Ends, float]) -> tuple[dict[Ends, float], dict[Ends, float]]:
    """Split connections into slow and fast ones, where the rates of neighbours are far apart and
    the slow ones have one host in common, or else two.

    Rates of fast connections may be far apart too: a transfer that takes only a moment mostly waits
    for its confirmation.
    """
    ordered = sorted(rates, key=lambda ends: rates[ends])
    cuts = [
        place
        for place, (low, high) in enumerate(pairwise(ordered), 1)
        if rates[low] <= _SLOW * rates[high]
    ]
    hosts = {cut: len(_common(ordered[:cut])) for cut in cuts}
    cut = next((cut for count in (1, 2) for cut in cuts if hosts[cut] == count), 0)
    return {ends: rates[ends] for ends in ordered[:cut]}, {
        ends: rates[ends] for ends in ordered[cut:]
    }


def _common(connections: Iterable[Ends]) -> set[str]:
    """Return the hosts that are an end of every connection."""
    return set.intersection(*(set(ends) for ends in connections))
