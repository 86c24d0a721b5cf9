"""The words of a stall: which rank the others wait for, and what that rank does. Pure: it knows only
the `RankSnapshot` of each rank (stalls.py takes them).

who            a rank that waits for others is not to blame. The rest are, above all those that have
               issued the fewest collectives. The collective that they lack is the one after their
               last
plain scripts  if all ranks wait, the report names the first collective that differs
several nodes  ranks that progress are slow, and not waited for
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.launcher.failures import named
from lockstep.runtime import processes, status
from lockstep.runtime.status import View

DOING = {
    "start": "starting",
    "data": "in data",
    "forward": "in forward",
    "backward": "in backward",
    "reduce": "in reduce",
    "optimizer": "in the optimizer",
    "checkpoint": "in a checkpoint",
    "evaluate": "in evaluation",
    "loop": "between steps",
    "checks": "in a check that the ranks agree",
    "end": "at the end of its program",
}
SILENT = {
    processes.STOPPED: "stopped (SIGSTOP or a debugger)",
    processes.DISK: "waiting for a disk or a network file system",
    processes.DEAD: "dead",
}
ENDED = "its process has ended, with exit code 0"
_ABSENT = (processes.STOPPED, processes.DEAD, ENDED)
_MESSAGES = "for messages of other ranks"


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """What is known of one rank from outside."""

    pid: int
    view: View
    state: str = ""
    """The state of its process: from `processes.state`, or ENDED."""
    line: str = ""
    """The innermost line of the user's code."""
    stack: str = ""
    activity: str = ""
    """What the rank does there, in a script whose phases are not known."""
    works: bool = False
    """Whether it is in such a script, and uses the processor."""

    @property
    def waits(self) -> bool:
        return self.view.waits and self.state not in _ABSENT


Snapshots = Mapping[int, RankSnapshot]
Views = Mapping[int, View]


@dataclass(frozen=True, slots=True)
class Stall:
    """The report of a stall."""

    rank: int
    """The rank that the others wait for; the first, if there are several."""
    message: str
    stack: str
    """The stack of that rank, outermost frame first; "" if it cannot be seen."""
    works: bool = False
    """Whether the rank may still come: then Lockstep ends no rank."""


def explain(
    snapshots: Snapshots, quiet: float, nodes: Mapping[int, str] | None = None
) -> Stall | None:
    """Explain a stall from what was seen after `quiet` seconds without any change.

    `nodes`: the label of each rank's node, if these are the ranks of all nodes.
    """
    if not snapshots:
        return None
    views = {rank: snapshots[rank].view for rank in sorted(snapshots)}
    guilty = {rank: snapshots[rank] for rank in suspects(snapshots)}
    first = min(guilty)
    waiting = {rank: view for rank, view in views.items() if view.waits and rank not in guilty}
    step = max(view.step for view in views.values())
    at = f", step {step}" if step or not _any_plain(views) else ""
    mismatch = None
    if all(snapshot.waits for snapshot in guilty.values()):
        mismatch = _find_mismatch(views)
    if mismatch is not None:
        sentences = _sentences_on_mismatch(mismatch, views)
    elif waiting:
        position, verdict = _position_and_verdict(waiting, views[first])
        sentences = [f"{position}{at}.", *_doings(guilty, verdict, quiet)]
    elif all(snapshot.view.waits for snapshot in guilty.values()):
        position = f"{_position(views[first])}{at}"
        if nodes is None:
            line = f"all ranks of this host wait {position}: for other hosts, or the network."
        else:
            line = (
                f"all ranks of all nodes wait {position}, which does not end: look at the network."
            )
        sentences = [line]
    else:
        sentences = [f"no rank makes progress{at}.", *_doings(guilty, "is", quiet)]
    if nodes is not None and (waiting or not views[first].waits):
        sentences.append(f"Rank {first} is on {nodes[first]}.")
    works = any(snapshot.works for snapshot in guilty.values())
    if works:
        sentences.append("It uses the processor and may still finish, so Lockstep only waits.")
    message = f"STALL {quiet:.0f} s: {' '.join(sentences)}"
    return Stall(first, message, guilty[first].stack, works)


def suspects(snapshots: Snapshots) -> list[int]:
    """Return the ranks that the others wait for: of the ranks that do not wait themselves, those
    that have issued the fewest collectives. If all wait, in different collectives: the smallest
    group of ranks in the same one.
    """
    views = {rank: snapshots[rank].view for rank in sorted(snapshots)}
    waiting = [rank for rank in views if snapshots[rank].waits]
    ranks = [rank for rank in views if rank not in waiting]
    if waiting:
        awaited: set[int] = set()
        for rank in waiting:
            awaited.update(views[rank].among or views)
        ranks = [rank for rank in ranks if rank in awaited]
    if not ranks:
        mismatch = _find_mismatch(views)
        if mismatch is not None:
            return min(mismatch.groups.values(), key=len)
        ranks = list(views)
    if not waiting:
        # no rank waits, so none misses a rank whose program is over
        ranks = [rank for rank in ranks if views[rank].phase != "end"] or ranks
    # prefer ranks that are stopped or dead: no other rank can have held them up
    ranks = [rank for rank in ranks if snapshots[rank].state in _ABSENT] or ranks
    fewest = min((views[rank].number for rank in ranks), default=0)
    return [rank for rank in ranks if views[rank].number == fewest]


def difference(directory: Path, ranks: Iterable[int]) -> str:
    """Return a sentence on the collectives that these ranks were last in, if they are not the same:
    gloo ends a process (SIGABRT) whose partner sends another number of bytes. "" if they are.
    """
    mismatch = _find_mismatch(views_of(directory, ranks))
    if mismatch is None:
        return ""
    return f"the ranks were not in the same collective: {_listed(mismatch.groups)}"


def views_of(directory: Path, ranks: Iterable[int]) -> dict[int, View]:
    """Return the pages of the ranks that have one by now."""
    views = {}
    for rank in ranks:
        view = view_of(directory, rank)
        if view is not None:
            views[rank] = view
    return views


def view_of(directory: Path, rank: int) -> View | None:
    """Return a rank's page; None if there is none yet."""
    return status.read(status.file_of(directory, rank))


def _any_plain(views: Views) -> bool:
    return any(view.plain for view in views.values())


class _Mismatch(NamedTuple):
    """Ranks that wait for each other in different calls."""

    number: int
    """The number of the collective that differs, or 0: the ranks wait in different places."""
    groups: Mapping[str, list[int]]
    """The ranks by what they call there."""


def _find_mismatch(views: Views) -> _Mismatch | None:
    """If all ranks wait: return the first collective that differs. If no number differs, return by
    where the ranks wait: torch's collectives and Lockstep's never meet. None if that is equal too.
    """
    if not _any_plain(views):
        return None
    numbers = set[int]().union(*(view.collectives for view in views.values()))
    for number in sorted(numbers):
        issued = [rank for rank, view in views.items() if number in view.collectives]
        groups = _group({rank: views[rank].collectives[number] for rank in issued})
        if _differ(groups):
            return _Mismatch(number, groups)
    positions = {rank: _position(view) for rank, view in views.items()}
    groups = _group(positions)
    if _differ(groups):
        return _Mismatch(0, groups)
    if len({bool(view.call) for view in views.values()}) == 1:
        return None
    for rank, view in views.items():
        positions[rank] += ", of torch.distributed" if view.call else ", of lockstep.collectives"
    return _Mismatch(0, _group(positions))


def _group(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks by their text."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return groups


def _differ(texts: Iterable[str]) -> bool:
    """Whether these are different calls. The line of the call does not count."""
    return len({text.rsplit(" at ", 1)[0] for text in texts}) > 1


def _listed(groups: Mapping[str, list[int]], before: str = "") -> str:
    return "; ".join(f"{before}{named(ranks)} {text}" for text, ranks in groups.items())


def _position(view: View) -> str:
    """Return where a rank waits: "in #8 (all_reduce sum f32[9] at train.py:20)"."""
    if view.messages:
        return _MESSAGES
    text = view.call or view.collectives.get(view.number, "")
    numbers = [number for number, call in view.collectives.items() if call == text]
    if numbers:
        return f"in #{max(numbers)} ({text})"
    return f"in {text}" if text else f"in #{view.number}"


def _sentences_on_mismatch(mismatch: _Mismatch, views: Views) -> list[str]:
    """Return sentences on ranks that wait for each other in different collectives."""
    number, groups = mismatch
    if not number:
        return [f"the ranks wait for each other in different places: {_listed(groups)}."]
    sentences = [
        f"the ranks wait for each other: #{number} is not the same. It is {_listed(groups, 'in ')}."
    ]
    for rank, view in views.items():
        position = _position(view)
        if view.waits and not position.startswith(f"in #{number} "):
            sentences.append(f"Rank {rank} waits {position} now.")
    return sentences


def _position_and_verdict(waiting: Views, guilty: View) -> tuple[str, str]:
    """Return where the others wait, and what to say of a rank that they wait for."""
    missing, verdict = _missing_collective(waiting, guilty)
    if _any_plain(waiting):
        groups = _group({rank: _position(view) for rank, view in waiting.items()})
        if not any(position.startswith(f"in #{missing} ") for position in groups):
            verdict = "is not there:"
    else:
        texts = dict(guilty.collectives)
        for view in waiting.values():
            texts.update(view.collectives)
        position = f"in #{missing}"
        if missing in texts:
            position += f" ({texts[missing]})"
        groups = {
            position: [rank for rank, view in waiting.items() if not view.messages],
            _MESSAGES: [rank for rank, view in waiting.items() if view.messages],
        }
    clauses = []
    for position, ranks in groups.items():
        if ranks:
            verb = "waits" if len(ranks) == 1 else "wait"
            clauses.append(f"{named(ranks)} {verb} {position}")
    return ", ".join(clauses), verdict


def _missing_collective(waiting: Views, guilty: View) -> tuple[int, str]:
    """Return the number of the collective in which the others wait, and what to say of the rank
    that does not come.
    """
    if all(view.messages for view in waiting.values()):
        return 0, "does not answer:"
    following = guilty.number + 1
    if any(following in view.collectives for view in waiting.values()):
        return following, "never issued it:"
    # they have all issued it, and wait for its end
    return guilty.number, "is in the middle of it:" if guilty.number else "has issued none:"


def _doings(snapshots: Snapshots, verdict: str, quiet: float) -> list[str]:
    """Return a sentence for each rank: "Rank 1 is in data, dataset.py:88 read_shard, for 31 s."."""
    sentences = []
    for rank, snapshot in snapshots.items():
        view = snapshot.view
        state = SILENT.get(snapshot.state, "")
        activity = snapshot.activity
        if not activity and not (state and view.plain):
            activity = DOING[view.phase]
        seconds = max(quiet, (time.monotonic_ns() - view.since_ns) / 1e9)
        doing = ", ".join(filter(None, (state, activity, snapshot.line, f"for {seconds:.0f} s")))
        if snapshot.state == ENDED:
            doing = ENDED
        sentences.append(f"Rank {rank} {verdict} {doing}.")
    return sentences
