"""A difference and what experiments have found, in sentences. Pure.

What was seen to change the result is the cause; the lines that asked for it are shown beside it. Where nothing changed it, what is left
is said, and that it is a guess.
"""

from __future__ import annotations

from lockstep.data.keyed import listed
from lockstep.verify.compare import Difference
from lockstep.verify.experiments import Evidence
from lockstep.verify.spy import CLOCK, ENTROPY, OWN, PROCESS, RANK, SEED, SIZE, THREADS, Call, Seen

_KEYED = "Draw from torch, numpy.random or random: they are seeded for every micro-batch and every sample"
_MOST_LINES = 3


def where(found: Difference, *, exact: bool) -> str:
    """What differs first."""
    one, other = found.workers
    if found.kind == "start":
        return f"before the first step {found.name} differs between {_workers(one)} and {_workers(other)}"
    place = f"step {found.step}"
    if found.slot is not None and found.ranks is not None:
        place += f", micro-batch {found.slot} (of {_ran(found)})"
    if found.kind == "again":
        return f"{place}: its samples {_listed(found)} are others when they are read once more after the training"
    if found.kind == "order":
        return f"{place}: it holds other samples on {_workers(one)} than on {_workers(other)}"
    if found.kind == "samples":
        return f"{place}: its samples{_numbers(found)} are not the same on {_workers(one)} and on {_workers(other)}"
    if found.kind == "weights":
        agree = "are equal" if exact else "agree"
        return (
            f"{place}: {found.name} differs after the update between {_workers(one)} and {_workers(other)}, though the gradients of all "
            f"micro-batches {agree}"
        )
    values = _values(found)
    if found.kind == "loss":
        first = f"; the first gradient that differs is that of {found.name}" if found.name else ""
        return f"{place}: from the same samples and weights its loss is {values} on {_workers(one)} and {_workers(other)}{first}"
    shown = f" (norms {values})" if values else ""
    return f"{place}: its loss is the same, but the gradient of {found.name} differs{shown} between {_workers(one)} and {_workers(other)}"


def undecided(error: str) -> str:
    """Where neither a cause was found, nor could the same training be run without rounding."""
    return (
        "not found: no cause showed when it was repeated, and the order of addition could not be ruled out, since the training does not run "
        f"with exact: {error.strip().splitlines()[-1]}"
    )


def why(found: Difference, evidence: Evidence | None, *, by_hash: bool) -> str:
    """The likely cause. `evidence`: None where there was nothing to repeat; `by_hash`: all is equal once text is hashed alike everywhere."""
    if by_hash:
        return _by_hash(found)
    if evidence is None:
        return _without(found)
    if evidence.after_forward:
        return (
            "a sample is edited in place: read again after the model and the loss have had it, it is another. The batch is the dataset's own "
            "memory, and what changes it changes the dataset on this rank alone: work on a clone, or return one from __getitem__ or collate"
        )
    if not evidence.repeats:
        return _restless(found, evidence.seen, f"{_what(found)} twice in one process, from the same random streams, gives two results")
    if not evidence.reloads:
        return _restless(
            found, evidence.loading, f"loading the task twice and {_what(found)}, from the same random streams, gives two results"
        )
    if evidence.rank:
        return _by_rank(found, evidence)
    if evidence.size:
        return _asking(evidence, "the number of workers: among another number it gives another result", SIZE) + (
            ". Divide by the weight that the loss returns, not by the world size"
        )
    if evidence.threads:
        return _asking(evidence, "the number of intra-op threads, of which a rank has more the fewer ranks there are", THREADS) + (
            ". --exact has every rank compute with one thread"
        )
    return _unexplained(found, evidence)


def _restless(found: Difference, seen: Seen, twice: str) -> str:
    """Two repetitions in one process came out differently: `twice` says of what, `seen` what it asked for meanwhile."""
    clock, entropy, own, seeds = (seen.of(what) for what in (CLOCK, ENTROPY, OWN, SEED))
    if clock:
        seeded = f", and seeds by it: {_lines(seeds)}" if seeds else ""
        return f"a time-based seed or value: {twice}, and it reads the clock: {_lines(clock)}{seeded}. {_KEYED}"
    if entropy or seen.moved or own:
        drawn = _lines(entropy or own) if entropy or own else f"a {' and a '.join(seen.moved)} of the task's own"
        return f"randomness outside the keyed streams: {twice}, and it draws from {drawn}. {_KEYED}"
    if seeds:
        return f"randomness outside the keyed streams: {twice}, and it seeds a generator by itself: {_lines(seeds)}. {_KEYED}"
    if found.kind in ("samples", "again"):
        return (
            f"a sample is edited in place: {twice}, and no random number is drawn. __getitem__ (or collate) changes what the dataset keeps, "
            "as `x -= x.mean()` does: work on a clone"
        )
    if found.kind == "gradient":
        return f"a nondeterministic operation in the backward: {twice}. --exact has torch raise an error that names it"
    return (
        f"something is kept from one call to the next: {twice}, and no random number is drawn outside the keyed streams. Look for a counter, "
        "a cache, or a tensor edited in place; failing that, for a nondeterministic operation"
    )


def _by_rank(found: Difference, evidence: Evidence) -> str:
    seeds = evidence.seen.of(SEED)
    if found.kind in ("samples", "again"):
        what = "the dataset depends on the rank: as another rank this process reads other samples"
    elif seeds:
        what = "randomness is seeded by the rank: as another rank this process gets another result"
    else:
        what = "the result depends on the rank: as another rank this process gets another one"
    asked = _lines(_asked(evidence, RANK) + seeds)
    if found.kind in ("samples", "again"):
        fix = "The Loader deals the samples out, so that each is read once: leave the rank out"
    elif seeds:
        fix = "Leave that out: the random streams of every micro-batch are seeded already"
    else:
        fix = "Which rank runs a micro-batch must not matter: leave the rank out"
    return f"{what}{f': {asked}' if asked else ''}. {fix}"


def _by_hash(found: Difference) -> str:
    return (
        f"the order of a set (or hash() of text): with PYTHONHASHSEED=0 in all processes {_what(found)} gives the same everywhere, and without "
        "it every process hashes text in its own way. Go through sorted(...) in place of the set"
    )


def _unexplained(found: Difference, evidence: Evidence) -> str:
    again = f"{_what(found)} again gives the same, also as another rank and among another number of workers"
    process = _asked(evidence, PROCESS)
    if process:
        return f"something that differs from process to process: {_lines(process)}; {again}"
    states = f"; the states of {' and '.join(found.reseeded)} differ after the loss" if found.reseeded else ""
    return (
        f"not found: {again}{states}. What is left is something that steps before it, or other micro-batches of its rank, have left behind"
    )


def _without(found: Difference) -> str:
    if found.kind == "order":
        return "the data order: order= gives another one in every process. It must follow from its own seed and the epoch alone"
    if found.kind == "weights":
        return (
            "the optimizer, or a buffer: does it draw random numbers, or ask for its rank? With --exact the sum has one order, so if neither "
            "asks, this is a bug of Lockstep"
        )
    return "the data order: a stream must yield the same samples in every process, whatever its rank; Lockstep deals them out"


def _asking(evidence: Evidence, what: str, kind: str) -> str:
    asked = _lines(_asked(evidence, kind))
    return f"the result depends on {what}{f': {asked}' if asked else ''}"


def _asked(evidence: Evidence, kind: str) -> list[Call]:
    return [*evidence.seen.of(kind), *evidence.loading.of(kind)]


def _what(found: Difference) -> str:
    doing = {"start": "building the model", "samples": "reading these samples", "again": "reading these samples"}
    return doing.get(found.kind, "running this micro-batch")


def _lines(calls: list[Call]) -> str:
    return " and ".join(map(str, calls[:_MOST_LINES]))


def _values(found: Difference) -> str:
    return " and ".join(f"{value:.9g}" for value in found.values) if found.values else ""


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"


def _ran(found: Difference) -> str:
    assert found.ranks is not None
    (one, other), (few, many) = found.ranks, found.workers
    if found.kind == "again":
        return f"rank {one} of {few}"
    return f"rank {one} of {few} and of rank {other} of {many}"


def _listed(found: Difference) -> str:
    return listed(found.indices or ())


def _numbers(found: Difference) -> str:
    return f" ({_listed(found)})" if found.indices is not None else ""
