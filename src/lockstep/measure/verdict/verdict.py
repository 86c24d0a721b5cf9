"""Where a training's time went, in sentences.

    4 ranks: 71 % efficient. Lost 29 %: 19 % waiting for rank 3 (its loader: 212 ms against 11), 7 % exposed all-reduce, 3 % other. Try ...

Efficient is the share of all ranks' time that went into forward, backward and optimizer. The rest is lost: to ranks that came later, to
communication that nothing was computed behind, to loaders, checks and whatever else lies between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.anatomy.generation import Anatomy
from lockstep.measure.verdict import words
from lockstep.measure.verdict.advice import Advice, advice
from lockstep.measure.verdict.judged import Judged, judged
from lockstep.measure.verdict.links import SlowLink, slow_link
from lockstep.measure.verdict.stragglers import LEAST, Straggler, lost_to, next_straggler, stragglers
from lockstep.settings import Settings

_USEFUL = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Of all ranks' time."""

    share: float
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Of the longest stretch without a restart."""

    ranks: int
    first: int
    last: int
    """The steps that were judged."""
    efficiency: float
    lost: tuple[Loss, ...]
    """Largest first, what is too small for a word of its own under "other"; they add up to 1 - efficiency."""
    stragglers: tuple[Straggler, ...]
    slow_link: SlowLink | None
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    """What must be known to read the figures."""

    def sentences(self) -> list[str]:
        """The verdict in one, then each note."""
        efficient, *losses = words.percentages([self.efficiency, *(each.share for each in self.lost)])
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        first = f"{ranks}: {efficient} % efficient."
        told = [f"{share} % {each.what}" for share, each in zip(losses, self.lost, strict=True) if share]
        if told:
            first += f" Lost {100 - efficient} %: {', '.join(told)}."
        if self.advice:
            first += f" Try {', or '.join(map(str, self.advice))}."
        return [first, *self.notes]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "sentences": self.sentences()}


def verdict(anatomy: Anatomy, settings: Settings | None = None) -> Verdict | None:
    """None where no step was taken. `settings`: what the run was asked for, so that nothing is advised that is in use."""
    found = judged(anatomy.longest, None if settings is None else settings.grid)
    if found is None:
        return None
    behind = stragglers(found)
    slow = slow_link(found.generation)
    useful = sum(place.phases[phase] for place in found.places.values() for phase in _USEFUL)
    efficiency = useful / found.seconds if found.seconds else 1.0
    return Verdict(
        ranks=found.generation.workers,
        first=found.first,
        last=found.last,
        efficiency=efficiency,
        lost=_losses(found, behind, slow, 1 - efficiency),
        stragglers=tuple(behind),
        slow_link=slow,
        advice=tuple(advice(found, behind, settings)),
        notes=tuple(words.notes(anatomy, found, next_straggler(found, behind))),
    )


def _losses(found: Judged, behind: Sequence[Straggler], slow: SlowLink | None, whole: float) -> tuple[Loss, ...]:
    places, total = found.places.values(), found.seconds or 1.0
    told = [Loss(share=each.share, what=words.straggler(each, found)) for each in behind]
    waited = sum(lost_to(found).values()) / total
    mutual = waited - sum(each.share for each in behind)
    told.append(Loss(share=mutual, what=words.mutual(found, bool(behind))))
    exposed = sum(place.phases["exposed"] for place in places) / total - waited
    told.append(Loss(share=exposed, what=words.exposed(found, slow)))
    told.append(Loss(share=sum(place.phases["data"] for place in places) / total, what=words.data(found, behind)))
    told.append(Loss(share=sum(place.phases["checks"] for place in places) / total, what="checks"))
    told = sorted((each for each in told if each.share >= LEAST), key=lambda each: -each.share)
    rest = whole - sum(each.share for each in told)
    return (*told, Loss(share=rest, what="other")) if rest > 0 else tuple(told)
