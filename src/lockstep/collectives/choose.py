"""The choice of an algorithm by "auto": a pure function of the call, so equal on all ranks.

The thresholds are constants, or were measured on this cluster by
`lockstep bench collectives --tune FILE`. Rank 0 reads that file when the world opens, and
broadcasts it, so no two ranks can choose differently.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.collectives.algorithms import check_algorithm
from lockstep.collectives.schedule import Kind
from lockstep.config.knob import within
from lockstep.errors import UsageError

FORMAT = "lockstep collectives tuning 1"
_KEY = "tuning of collectives"
TUNING_VARIABLE = "LOCKSTEP_TUNING"
_FOREVER = float("inf")


@dataclass(frozen=True, slots=True)
class Tuning:
    """The thresholds. For each collective, `table` has pairs (largest number of bytes, algorithm),
    in ascending order; the last number is infinite.

    `world` is the number of ranks of the measurement. It is None for the constants, which apply to
    any number of ranks.
    """

    table: Mapping[str, Sequence[tuple[float, str]]] = field(default_factory=dict)
    world: int | None = None
    source: str = "built in"

    def choose(self, kind: Kind, bytes: int, world: int) -> str:
        """Return the algorithm for a tensor of `bytes` bytes among `world` ranks."""
        if world == 1:
            return "native"
        if self.world not in (None, world):
            return BUILT_IN.choose(kind, bytes, world)
        for most, algorithm in self.table.get(kind, ()):
            if bytes <= most:
                return algorithm
        return "native"

    def as_json(self) -> dict[str, Any]:
        table = {
            kind: [[None if most == _FOREVER else most, name] for most, name in pairs]
            for kind, pairs in self.table.items()
        }
        return {"format": FORMAT, "world": self.world, "table": table}

    @classmethod
    def from_json(cls, found: Any, source: str) -> Tuning:
        """Read a tuning from its JSON. Raises UsageError for other JSON and for an unknown
        algorithm, ValueError for sizes that do not ascend.
        """
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise UsageError("not-a-tuning", file=source)
        table: dict[str, list[tuple[float, str]]] = {}
        for kind, pairs in found["table"].items():
            with within(source):
                for _, name in pairs:
                    check_algorithm(kind, name, "native")
            table[kind] = [
                (_FOREVER if most is None else float(most), name) for most, name in pairs
            ]
            sizes = [most for most, _ in table[kind]]
            if sizes != sorted(sizes):
                raise ValueError(f"the sizes of {kind} are not in ascending order")
        return cls(table, found["world"], source)

    @classmethod
    def read(cls, file: Path) -> Tuning:
        try:
            return cls.from_json(json.loads(file.read_text(encoding="utf-8")), str(file))
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError("cannot-read", name="tuning", file=str(file), reason=reason) from error
        except UsageError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError("tuning-damaged", file=str(file), error=str(error)) from error


# Small tensors: point-to-point messages over gloo cost less than gloo's all-reduce. Large tensors
# use the backend's own collective.
BUILT_IN = Tuning({"all_reduce": [(64 * 2**10, "recursive_doubling"), (_FOREVER, "native")]})


def share_tuning(store: dist.Store, file: Path | str | None, rank: int, size: int) -> Tuning:
    """Return rank 0's thresholds, on all ranks. They come from `file`, else from the file that
    LOCKSTEP_TUNING names, else they are built in.

    Every rank calls it. Rank 0 prints which file it read. Raises UsageError, on all ranks, for a
    file that cannot be used.
    """
    if rank:
        said = json.loads(store.get(_KEY).decode())
    else:
        file = file or os.environ.get(TUNING_VARIABLE)
        said = _said(Path(file)) if file else {}
        if size > 1:
            store.set(_KEY, json.dumps(said))
        if "tuning" in said:
            print(f"collectives are chosen by {file}", file=sys.stderr)
    if "error" in said:
        raise UsageError(said["error"])
    return Tuning.from_json(said["tuning"], said["source"]) if said else BUILT_IN


def _said(file: Path) -> dict[str, Any]:
    try:
        found = Tuning.read(file)
    except UsageError as error:
        return {"error": str(error)}
    return {"tuning": found.as_json(), "source": found.source}
