"""Do all ranks train the same task? Its code and some of its samples are compared at the start, by
their digests (task_digest.py).

A rank with another loss, or with other contents under the same sample numbers, trains without an
error and wrong.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence

from lockstep.collectives.group import Group
from lockstep.collectives.tags import listed
from lockstep.collectives.texts import everybodys
from lockstep.errors import LockstepWarning, ReplicaDivergence
from lockstep.training.task_digest import SAMPLE

_PLACE = "for the comparison of tasks at the start"


def compare_tasks(group: Group, digests: Mapping[str, str]) -> None:
    """Compare the digests of the ranks' tasks. Every rank of `group`, whose tensors are on the CPU,
    calls it.

    Raises ReplicaDivergence, on all ranks, for other code or another sample. A value that the code
    reads may differ on purpose (a rank's number, a file's name), so that rank 0 warns of it. What a
    rank has not read (samples are read for a limited time) is not compared.
    """
    if group.size == 1:
        return
    code = {name: text for name, text in digests.items() if not name.startswith(SAMPLE)}
    told = everybodys(
        {
            "code": _sha(code),
            "samples": {name: text for name, text in digests.items() if name.startswith(SAMPLE)},
        },
        group,
        _PLACE,
    )
    if name := _first_difference([each["samples"] for each in told]):
        ranks = _others([each["samples"] for each in told], name)
        raise ReplicaDivergence(
            "samples-differ-between-ranks", parameter=name, ranks=ranks, others=listed(ranks)
        )
    if len({each["code"] for each in told}) > 1:
        _compare_code(everybodys(code, group, _PLACE), group.rank)


def _compare_code(everyone: Sequence[Mapping[str, str]], rank: int) -> None:
    # "my_task.py: loss, SCALE" is a value that the code of the loss reads, all other names are of
    # the code itself.
    strict = [{name: text for name, text in each.items() if ", " not in name} for each in everyone]
    if name := _first_difference(strict):
        ranks = _others(strict, name)
        raise ReplicaDivergence(
            "task-differs-between-ranks", parameter=name, ranks=ranks, others=listed(ranks)
        )
    name = _first_difference(everyone)
    if name and rank == 0:
        other = _others(everyone, name)[0]
        warnings.warn(
            f"the task's code reads a value that differs between ranks: {name} is"
            f" {everyone[0][name]} on rank 0 and {everyone[other][name]} on rank {other}. Make sure"
            " that the loss and the data do not depend on it",
            LockstepWarning,
            stacklevel=2,
        )


def _first_difference(everyone: Sequence[Mapping[str, str]]) -> str:
    return next((name for name in everyone[0] if _others(everyone, name)), "")


def _others(everyone: Sequence[Mapping[str, str]], name: str) -> list[int]:
    """The ranks that have `name`, and another text for it than rank 0."""
    return [
        rank
        for rank, each in enumerate(everyone)
        if each.get(name, everyone[0][name]) != everyone[0][name]
    ]


def _sha(fields: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
