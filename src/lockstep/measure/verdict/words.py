"""How a verdict's parts are said."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from lockstep.anatomy.generation import Anatomy, Generation
from lockstep.measure.verdict.advice import SHARED, crowded
from lockstep.measure.verdict.judged import Judged
from lockstep.measure.verdict.links import SlowLink
from lockstep.measure.verdict.stragglers import Cause, Straggler

_LARGE = 0.1
"""Share of the whole time from which on a pause is told."""
_CAUSES: Mapping[Cause, str] = {
    "data": "its loader",
    "forward": "its forward",
    "backward": "its backward",
    "computation": "its forward and backward",
    "optimizer": "its optimizer",
    "checks": "its checks",
    "other": "its own code between steps",
    "network": "its network",
}


def percentages(shares: Sequence[float]) -> list[int]:
    """Whole per cents that add up as the shares do: what rounding down leaves goes to the largest remainders."""
    whole = [math.floor(100 * share) for share in shares]
    left = round(100 * sum(shares)) - sum(whole)
    by_remainder = sorted(range(len(shares)), key=lambda place: whole[place] - 100 * shares[place])
    for place in by_remainder[:left]:
        whole[place] += 1
    return whole


def straggler(each: Straggler, found: Judged) -> str:
    """`waiting for rank 3 (its loader: 212 ms against 11)`."""
    return f"waiting for {place(each.place, found)} ({_cause(each, found)})"


def _cause(each: Straggler, found: Judged) -> str:
    if each.cause == "work":
        return f"{each.mine:.3g} micro-batches a step against {each.others:.3g}"
    what = _CAUSES[each.cause]
    if each.cause == "network" and found.generation.begin.reduction.startswith(SHARED):
        what = "its part of the sums"
    return f"{what}: {milliseconds(each.mine)} ms against {milliseconds(each.others)}"


def place(number: int, found: Judged) -> str:
    """`rank 3`; on a mesh `replica 1 (ranks 2 and 3)`."""
    if found.mesh is None:
        return f"rank {number}"
    return f"replica {number} ({ranks(found.places[number].ranks)})"


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 2`, `ranks 0, 1 and 2`, `ranks 0, 1, 2 and 9 more`."""
    shown = [str(number) for number in numbers[:4]]
    if len(numbers) > 4:
        shown = [*shown[:3], f"{len(numbers) - 3} more"]
    listed = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"rank{'s' * (len(numbers) > 1)} {listed}"


def mutual(found: Judged, some: bool) -> str:
    """Waiting that no rank is the cause of. `some`: others are named."""
    spreads = [each.spread for each in found.places.values() if each.spread is not None]
    varies = f": a rank's steps vary by {100 * statistics.fmean(spreads):.0f} %" if spreads else ""
    return "waiting for others in turn" + varies if some else "waiting for each other, nobody in particular" + varies


def exposed(found: Judged, slow: SlowLink | None) -> str:
    """Communication that nothing was computed behind."""
    method = found.generation.begin.method
    if method.startswith("server"):
        return "exchange with the server"
    if found.generation.workers == 1:
        return "between backward and optimizer"
    what = "meetings of the replicas" if method.startswith("local") else "exposed all-reduce"
    if method.startswith("sharded"):
        what = "exposed reduce-scatter and all-gather"
    if slow is None:
        return what
    whose = f"the network of {slow.host}" if not slow.ranks else f"{_possessive(slow.ranks)} network"
    whose += f" towards {slow.towards}" if slow.towards else ""
    return f"{what}, held up by {whose} ({_rate(slow.rate)} against {_rate(slow.others)})"


def data(found: Judged, behind: Sequence[Straggler]) -> str:
    """`waiting for data (11 ms a step)`; of the rank whose loader is slow, if it is one's."""
    slow = [each for each in behind if each.cause == "data"]
    if slow:
        return f"waiting for data ({place(slow[0].place, found)}: {milliseconds(slow[0].mine)} ms a step)"
    return f"waiting for data ({milliseconds(statistics.fmean(each.each('data') for each in found.places.values()))} ms a step)"


def notes(anatomy: Anatomy, found: Judged, then: Straggler | None) -> Iterator[str]:
    """What must be known to read the figures, in sentences. `then`: who would be the next straggler."""
    generation = found.generation
    if found.first == found.last:
        yield f"Judged by step {found.first} alone: too few for a verdict, and a first step also warms up."
    if len(anatomy.generations) > 1:
        yield (
            f"Of {len(anatomy.generations)} stretches between restarts the longest is judged: "
            f"steps {found.first} to {found.last}, on {_ranks(generation.workers)}."
        )
    if generation.missing:
        left = ranks(generation.missing)
        yield f"{left.capitalize()} of {generation.workers} left no anatomy: the figures are of the others."
    if anatomy.unread:
        lines = sum(anatomy.unread.values())
        yield f"{lines} line{'s' * (lines > 1)} of {ranks(sorted(anatomy.unread))} could not be read and {'are' if lines > 1 else 'is'} left out."
    if found.alone and generation.workers > 1:
        yield f"Ranks do not wait for each other in a step ({generation.begin.method})."
    for host, (count, threads, cores) in crowded(found).items():
        of = "" if threads == 1 else f" of {threads} threads each"
        yield (
            f"{_ranks(count)}{of} share the {cores} core{'s' * (cores > 1)} of {host}: they slow each other down, "
            "and whom one waits for is often only who was last to get a core."
        )
    if then is not None:
        yield f"The next to be waited for, behind those named, is {place(then.place, found)} ({_cause(then, found)})."
    yield from _uneven_work(found)
    yield from _pauses(generation)


def _uneven_work(found: Judged) -> Iterator[str]:
    """Micro-batches that do not divide among the ranks."""
    begin, count = found.generation.begin, len(found.places)
    pieces = -(-begin.global_batch // begin.micro_batch) if begin.micro_batch else 0
    if count == 1 or found.alone or not pieces % count:
        return
    more = next((each for each in range(count + 1, pieces + 1) if not pieces % each), None)
    then = f"; {more} would have {pieces // more} each" if more else ""
    if pieces < count:
        yield f"{pieces} micro-batch{'es' * (pieces > 1)} for {count} ranks: {count - pieces} have none."
    else:
        yield f"{pieces} micro-batches do not divide among {count} ranks: some have {-(-pieces // count)}, some {pieces // count}{then}."


def _pauses(generation: Generation) -> Iterator[str]:
    """Evaluations and checkpoints, where they are long. All ranks take part: the longest of each is the run's."""
    sums: dict[str, float] = {}
    for lane in generation.lanes.values():
        of_rank: dict[str, float] = {}
        for pause in lane.pauses:
            of_rank[pause.what] = of_rank.get(pause.what, 0.0) + pause.seconds
        sums = {what: max(sums.get(what, 0.0), of_rank.get(what, 0.0)) for what in {**sums, **of_rank}}
    whole = generation.seconds + sum(sums.values())
    large = {what: seconds for what, seconds in sums.items() if seconds >= _LARGE * whole}
    if large:
        told = [f"{_seconds(seconds)} in {_PAUSES.get(what, what)} ({100 * seconds / whole:.0f} %)" for what, seconds in large.items()]
        yield f"Outside of steps, and not in the figures above: {' and '.join(told)} of {_seconds(whole)}."


_PAUSES = {"evaluate": "evaluations", "checkpoint": "checkpoints"}


def milliseconds(seconds: float) -> str:
    """Without a unit: `212`, `11`, `0.35`."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.00995 else f"{1e3 * seconds:.2g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.3g} MB/s"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _possessive(numbers: Sequence[int]) -> str:
    return f"{ranks(numbers)}'s" if len(numbers) == 1 else f"{ranks(numbers)}'"
