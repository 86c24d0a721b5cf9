"""`lockstep train --multirun KEY=V1,V2`: one run for each combination of values, one after another,
each in a folder of the run directory that bears its values.

The same command again skips what is finished, resumes what is not, and trains what was added.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lockstep.config.launching import RunChoice
from lockstep.errors import UsageError


def each_run(choice: RunChoice, new: Path) -> Iterator[RunChoice]:
    """The runs that are asked for, each with its own --set and --run; without --multirun the one
    as it is.

    Args:
        choice: as given.
        new: the run directory, where none is given.

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
    """`0.1,0.2`; a comma inside brackets belongs to its value."""
    found, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found
