"""`lockstep train --multirun KEY=V1,V2`: one run for each combination of values, one after another.
Each has a folder in the run directory, named after its values.

The same command again skips finished runs, resumes unfinished ones, and trains added ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lockstep.config.launching import RunChoice
from lockstep.errors import UsageError


def each_run(choice: RunChoice, new: Path) -> Iterator[RunChoice]:
    """Yield the runs of --multirun, each with its own --set and --run. Without --multirun, yield
    `choice` unchanged.

    Args:
        choice: the options as given.
        new: the run directory if none is given.

    Raises UsageError for a parameter that --set gives too.
    """
    if not choice.multirun:
        yield choice
        return
    for key in choice.multirun.keys() & choice.overrides.keys():
        raise UsageError("given-twice", where="--set and --multirun", name=key)
    every = list(itertools.product(*map(_values, choice.multirun.values())))
    for values in every:
        chosen = dict(zip(choice.multirun, values, strict=True))
        name = ",".join(f"{key}={value}" for key, value in chosen.items())
        yield replace(
            choice,
            run=(choice.run or new) / name.replace("/", "_"),
            overrides={**choice.overrides, **chosen},
            multirun={},
        )


def _values(text: str) -> list[str]:
    """Split `0.1,0.2` at its commas; a comma inside brackets belongs to the value."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found
