"""Does every door train what one process of plain torch trains? Many short trainings, drawn from
seeds.

    python benchmarks/fuzz.py --seeds 0:2000
    python benchmarks/fuzz.py --seeds 417:418

Each seed draws a model, an optimizer, data, a number of ranks, a door (a Stepper with a Loader or
with lists, the wrapper, ShardedOptimizer, the hook, the backend) and options; in a third of them
ranks are idle in some windows. The oracle trains the same in one process of plain torch
(fuzz_oracle.py). What a rank computes must be equal to it: within rounding, and in exact mode with
the bits of one rank. An error that a combination is refused with is counted by its code; any other
difference is printed with the seed and what it drew. A training in bfloat16 that differs is
repeated in float32, where it must be equal. Ends with 1 where there was any other difference.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

import lockstep
from fuzz_case import Case
from fuzz_doors import train
from fuzz_draw import drawn
from fuzz_oracle import Trace, Unused, oracle
from lockstep.errors import LockstepError, UnusedParameters, UsageError

_A_TEAM = 50  # trainings of the same ranks, one after the other
_REFUSED = 1
_ORACLES = "the oracle's"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case came to on one rank."""

    trace: Trace | None = None
    digest: bytes = b""
    """Of all that must be equal on all ranks."""
    code: str = ""
    """Of the error that refused it."""
    error: str = ""
    """Any other error."""


# -- on the ranks ----------------------------------------------------------------------------------


def outcomes(cases: Sequence[Case]) -> list[Outcome]:
    """Train cases, until one ends the world."""
    found: list[Outcome] = []
    alike = True
    while alike and len(found) < len(cases):
        try:
            with lockstep.init(backend="gloo") as world:
                torch.set_num_threads(1)
                alike = _in_one_world(cases[len(found) :], world, found)
        except LockstepError:
            if alike:  # else the world has ended with what `found` tells
                raise
    return found


def _in_one_world(cases: Sequence[Case], world: lockstep.World, found: list[Outcome]) -> bool:
    """Train cases until the world must close, as exact mode lasts until then. Return whether all
    ranks came to the same.
    """
    for case in cases:
        found.append(_outcome(case, world))
        if not _all_alike(found[-1]):
            return False
        if case.options.get("exact"):
            break
    return True


def _outcome(case: Case, world: lockstep.World) -> Outcome:
    try:
        with warnings.catch_warnings(action="ignore"):
            trace = train(case, world)
    except (UsageError, UnusedParameters) as error:
        return Outcome(code=error.code, error="" if error.code else str(error))
    except Exception as error:
        return Outcome(error="".join(traceback.format_exception(error)[-4:]))
    common = [trace.end["model"], *(step.get("model") for step in trace.steps)]
    return Outcome(trace if world.rank == 0 else None, _digest(common))


def _all_alike(outcome: Outcome) -> bool:
    """Whether all ranks have trained this case, or all were refused."""
    state = 2 if outcome.error else _REFUSED if outcome.code else 0
    seen = torch.tensor([state, -state])
    try:
        lockstep.collectives.all_reduce(seen, "max")
    except LockstepError:
        return False
    return state < 2 and bool(seen[0] == -seen[1])


def _digest(values: Iterable[Mapping[str, Tensor] | None]) -> bytes:
    found = hashlib.sha256()
    for tensors in values:
        for tensor in (tensors or {}).values():
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


# -- in one process --------------------------------------------------------------------------------


def trained(cases: Sequence[Case], ranks: int) -> Iterator[list[Outcome]]:
    """Train cases on teams of ranks; of each case, the outcomes by rank."""
    rest = list(cases)
    while rest:
        try:
            by_rank = lockstep.launch(
                outcomes, ranks, (rest,), timeout=timedelta(seconds=60 + 3 * len(rest))
            )
        except LockstepError as error:
            if len(rest) > 1:
                for case in rest:
                    yield from trained([case], ranks)
            else:
                yield [Outcome(error=f"{type(error).__name__}: {error}")]
            return
        count = min(map(len, by_rank))
        for place in range(count):
            yield [each[place] for each in by_rank]
        rest = rest[count:]


def judged(seeds: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """Yield each seed with what became of it: equal, rounding, refused or different; and the code
    of a refusal or the first difference.
    """
    by_ranks: dict[int, list[Case]] = {}
    for seed in seeds:
        case = drawn(seed)
        by_ranks.setdefault(case.ranks, []).append(case)
    for ranks, cases in sorted(by_ranks.items()):
        for begin in range(0, len(cases), _A_TEAM):
            team = cases[begin : begin + _A_TEAM]
            alone = [case for case in team if _by_one_rank(case)]
            references = {
                case.seed: found[0] for case, found in zip(alone, trained(alone, 1), strict=True)
            }
            for case, found in zip(team, trained(team, ranks), strict=True):
                what, detail = _judged(case, found, references.get(case.seed))
                if case.dtype is torch.bfloat16 and _ORACLES in detail and _by_rounding(case):
                    what = "rounding"
                yield case.seed, what, detail


def _by_rounding(case: Case) -> bool:
    """Whether the same training in float32 is equal to the oracle's: its gradients may be
    differences of large numbers, which eight bits do not hold.
    """
    wider = replace(case, dtype=torch.float32)
    (found,) = trained([wider], case.ranks)
    return _judged(wider, found, None) == ("equal", "")


def _by_one_rank(case: Case) -> bool:
    """Whether one rank's training is a reference too."""
    return not case.local and (case.keyed or case.options.get("exact", False))


def _judged(case: Case, found: Sequence[Outcome], alone: Outcome | None) -> tuple[str, str]:
    expected: Trace | None = None
    unused = False
    try:
        with warnings.catch_warnings(action="ignore"):
            expected = oracle(case)
    except Unused:
        unused = True
    except Exception as error:
        expected = None
        torchs = f"torch: {type(error).__name__}: {error}"
    if unused and case.local and any(each.code == "unused-parameters" for each in found):
        return "refused", "unused-parameters"  # a rank that steps alone says it alone
    errors = sorted({each.error for each in found if each.error}, key=len)
    if errors:
        if expected is None and not unused:
            return "refused", torchs
        return "different", errors[-1]
    codes = {each.code for each in found}
    if codes != {""}:
        (code,) = codes if len(codes) == 1 else ("; ".join(sorted(codes)),)
        wrong = len(codes) > 1 or (code == "unused-parameters" and not unused and _foreseen(case))
        return ("different" if wrong else "refused"), code
    if unused:
        return ("different", "no UnusedParameters") if _foreseen(case) else ("equal", "")
    trace = found[0].trace
    assert trace is not None
    if len({each.digest for each in found}) > 1:
        return "different", "the ranks have different bits"
    if expected is None:
        return "different", f"only plain torch fails: {torchs}"
    text = None
    if not case.approximate and not (case.keyed and not case.local):
        text = difference(trace, expected, case.tolerance)
    if text is None and alone is not None and alone.trace is not None:
        exact = case.options.get("exact", False)
        text = difference(trace, alone.trace, 0.0 if exact else case.tolerance, "one rank's")
    return ("equal", "") if text is None else ("different", text)


def _foreseen(case: Case) -> bool:
    """Whether the oracle knows if a parameter is unused: a server judges by draw."""
    return case.options.get("update") != "server"


def difference(ours: Trace, other: Trace, tolerance: float, who: str = _ORACLES) -> str | None:
    """Return the first difference, or None."""
    pairs = [
        (f"step {step}", *both)
        for step, both in enumerate(zip(ours.steps, other.steps, strict=False))
    ]
    for where, mine, theirs in [*pairs, ("the end", ours.end, other.end)]:
        for name in [name for name in mine if name in theirs]:
            pair = mine[name], theirs[name]
            if name == "state":
                pair = _with_elements(pair[0]), _with_elements(pair[1])
            text = _unlike(*pair, tolerance)
            if text:
                return f"{where}, {name}{text} (first ours, then {who})"
    return None


def _with_elements(state: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
    """Leave out parameters without elements: a sharded update gives them the counters of others."""
    found = {}
    for number, values in state.items():
        sizes = [value.numel() for value in values.values() if isinstance(value, Tensor)]
        if 0 not in sizes:
            found[number] = values
    return found


def _unlike(mine: Any, theirs: Any, tolerance: float) -> str:
    if isinstance(mine, Mapping):
        if mine.keys() != theirs.keys():
            return f": {sorted(map(str, mine))} and {sorted(map(str, theirs))}"
        for key, value in mine.items():
            if text := _unlike(value, theirs[key], tolerance):
                return f" {key}{text}"
        return ""
    if isinstance(mine, (list, tuple)):
        return "".join(_unlike(*both, tolerance) for both in zip(mine, theirs, strict=True))
    if mine is None or theirs is None or isinstance(mine, bool):
        return "" if mine is theirs else f": {mine} and {theirs}"
    one, other = torch.as_tensor(mine), torch.as_tensor(theirs)
    if one.shape != other.shape or one.is_sparse != other.is_sparse:
        return f": shapes {list(one.shape)} and {list(other.shape)}"
    one, other = (each.to_dense() if each.is_sparse else each for each in (one, other))
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    bound = tolerance * (1 + float(other.abs().nan_to_num().max())) if other.numel() else 0.0
    if torch.allclose(one, other, rtol=0.0, atol=bound, equal_nan=True):
        return ""
    return f": {one.flatten()[:6].tolist()} and {other.flatten()[:6].tolist()}"


def report(seeds: Sequence[int]) -> Counter[str]:
    """Print what differs, and return how often each thing happened."""
    counts: Counter[str] = Counter()
    for seed, what, detail in judged(seeds):
        counts[f"refused {detail.partition(':')[0]}" if what == "refused" else what] += 1
        if what == "different":
            print(f"seed {seed}: {drawn(seed)}\n    {detail}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:2000", metavar="A:B")
    # torch's wrapper warns of find_unused_parameters where none is unused
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    begin, _, end = parser.parse_args().seeds.partition(":")
    seeds, start = range(int(begin), int(end)), time.monotonic()
    counts = report(seeds)
    refused = {
        name.removeprefix("refused "): count
        for name, count in sorted(counts.items())
        if name.startswith("refused ")
    }
    codes = ", ".join(f"{count} {name}" for name, count in refused.items())
    print(
        f"{len(seeds)} seeds in {time.monotonic() - start:.0f} s: {counts['equal']} equal,"
        f" {counts['rounding']} differ by the rounding of bfloat16 only,"
        f" {sum(refused.values())} refused ({codes}), {counts['different']} different"
    )
    sys.exit(counts["different"] > 0)


if __name__ == "__main__":
    main()
