"""The options that decide how the ranks' work is combined, and their valid combinations.

    reduce      how gradients are summed           compress    how they are compressed for sending
    update      who applies them                   sync_every  how often replicas synchronize
    exact       one order of addition, at any number of ranks
    mesh        which rank holds which part of the model

A value with options of its own is one text, `name:option=value,...`. This file does not import
torch, so that the command line can check options before any rank starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal

from lockstep.config import knob
from lockstep.config.knob import Knob
from lockstep.config.mesh import Mesh
from lockstep.errors import UsageError

Reduce = Literal[
    "auto", "native", "central", "ring", "tree", "halving_doubling", "shared_memory", "hierarchical"
]
Weights = Literal["auto", "shared", "separate"]
CAST = ("bf16", "fp16")
COMPRESSIONS = (*CAST, "int8", "powersgd:RANK")
UPDATES = ("replicated", "sharded", "server")
OUTERS = ("average", "nesterov")


@dataclass(frozen=True, slots=True)
class Compression:
    """A value of `compress`: `bf16`, `fp16`, `int8` or `powersgd:4`."""

    kind: str
    rank: int | None = None
    """The rank of PowerSGD's factors."""

    @classmethod
    @cache
    def read(cls, text: str) -> Compression:
        """Read the text of the option. Raises UsageError for an invalid one."""
        kind, _, rank = text.partition(":")
        if kind == "powersgd":
            if not (rank.isdecimal() and int(rank)):
                raise UsageError("powersgd-without-rank", compress=text)
            return cls(kind, int(rank))
        if text not in (*CAST, "int8"):
            knob.chosen("compress", text, COMPRESSIONS)
        return cls(text)

    @property
    def owes(self) -> bool:
        """Whether what a step leaves out is added to later steps (error feedback)."""
        return self.kind not in CAST

    def __str__(self) -> str:
        return self.kind if self.rank is None else f"{self.kind}:{self.rank}"


@dataclass(frozen=True, slots=True)
class Outer:
    """The outer optimizer. When replicas synchronize, it takes their weighted average, or a step of
    SGD with Nesterov momentum towards this average (DiLoCo).
    """

    kind: str = "average"
    lr: float = 0.7
    """Learning rate of the Nesterov step. The defaults of `lr` and `momentum` are those of the
    DiLoCo paper.
    """
    momentum: float = 0.9
    after: int = 0
    """Number of steps with summed gradients before local steps begin (post-local SGD)."""
    fragments: int = 1
    """Number of parts of the model that synchronize one after the other, spread over the steps
    between two synchronizations (Streaming DiLoCo).
    """
    overlap: int = 0
    """Number of steps that are computed while the sums of a synchronization are sent."""

    def __post_init__(self) -> None:
        knob.chosen("outer", self.kind, OUTERS)
        with knob.within(f"outer={str(self)!r}"):
            knob.number("lr", self.lr, above=0)
            knob.number("momentum", self.momentum, least=0, below=1)
            for name, least in (("after", 0), ("fragments", 1), ("overlap", 0)):
                knob.whole(name, getattr(self, name), least)
        if self.kind == "average" and (self.lr, self.momentum) != (0.7, 0.9):
            raise UsageError("average-with-lr", outer=str(self))

    @classmethod
    @cache
    def read(cls, text: str) -> Outer:
        """Read a text such as `average`, `nesterov:lr=0.7,momentum=0.9`, `average:after=100` or
        `nesterov:fragments=4,overlap=2`. Raises UsageError for an invalid one.
        """
        kind, colon, rest = text.partition(":")
        source = f"outer={text!r}"
        options = knob.pairs(rest.split(",") if colon else (), source)
        knob.known([field.name for field in fields(cls)[1:]], options, source)
        values: dict[str, Any] = {name: _number(value) for name, value in options.items()}
        return cls(kind, **values)

    def __str__(self) -> str:
        """Return the text that `read` takes, without default values."""
        options = []
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                text = value if isinstance(value, str) else knob.text_of(value)
                options.append(f"{field.name}={text}")
        return f"{self.kind}:{','.join(options)}" if options else self.kind


def _number(value: Any) -> Any:
    """Convert a text to a number if it is one. A whole number becomes an int in any notation:
    2, 2.0, 1e2.
    """
    if isinstance(value, str):
        value = knob.value_of(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


DEFAULT_STALENESS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """The options that decide how the ranks' work is combined. Raises UsageError for invalid values
    and for options that cannot be combined.
    """

    reduce: Annotated[Reduce, Knob("gradients")] = "auto"
    """Algorithm that sums gradients. auto uses shared memory if all ranks are on one CPU host."""
    exact: Annotated[bool, Knob("gradients", common=True)] = False
    """Give the same bits at any number of workers, with a fixed order of addition and deterministic
    algorithms.
    """
    witness: Annotated[int | float | str | None, Knob("faults", unit="SHARE", default="none")] = (
        None
    )
    """Share of steps that other ranks compute again and compare, such as 1% (with --exact)."""
    compress: Annotated[
        str | None,
        Knob("gradients", unit="bf16|fp16|int8|powersgd:RANK", default="no compression"),
    ] = None
    """Compress gradients before they are sent."""
    update: Annotated[str, Knob("gradients", unit="replicated|sharded|server")] = "replicated"
    """Who applies the update: every rank, each rank for its share, or an asynchronous server."""
    weights: Annotated[
        Weights, Knob("gradients", default="auto, which shares them on one CPU host")
    ] = "auto"
    """With --update sharded: one copy of the weights per host (shared) or per rank (separate)."""
    staleness: Annotated[
        int | float | str | None, Knob("gradients", unit="STEPS|inf", default="4")
    ] = None
    """Maximum number of steps that a worker may be ahead of the slowest (--update server)."""
    sync_every: Annotated[
        int | None, Knob("gradients", unit="STEPS", least=1, default="no local steps")
    ] = None
    """Local steps of each rank between two synchronizations of the replicas."""
    outer: Annotated[str | None, Knob("gradients", unit="average|nesterov", default="average")] = (
        None
    )
    """Outer optimizer that combines the replicas when they synchronize (with --sync-every)."""
    mesh: Annotated[Mesh | None, Knob("model split", unit="AXIS=N,...")] = None
    """Ranks on the axes data, shard, pipeline and tensor, such as data=2,pipeline=2. Their product
    is --workers.
    """

    def __post_init__(self) -> None:
        for name in ("compress", "outer"):
            value = getattr(self, name)
            if value is not None:
                # also accept a Compression or an Outer in place of its text
                object.__setattr__(self, name, str(value))
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            object.__setattr__(self, "mesh", Mesh.read(self.mesh))
        knob.check(self)
        knob.chosen("update", self.update, UPDATES)
        if self.compress is not None:
            Compression.read(self.compress)
        self._check_sync_every()
        self._check_staleness()
        for code, applies in self._refusals().items():
            if applies:
                values = knob.values_of(self, Parallelism) | {"mesh": str(self.mesh)}
                raise UsageError(code, **values)

    @property
    def compression(self) -> Compression | None:
        return None if self.compress is None else Compression.read(self.compress)

    @property
    def local(self) -> Outer | None:
        """The outer optimizer of local steps; None without local steps."""
        return None if self.sync_every is None else Outer.read(self.outer or "average")

    @property
    def server(self) -> bool:
        """Whether an asynchronous server applies the updates."""
        return self.update == "server"

    @property
    def witnessed(self) -> float:
        """The share of steps that other ranks compute again; 0 for none. Raises UsageError for an
        invalid share.
        """
        if self.witness is None:
            return 0.0
        text = str(self.witness)
        value = _number(text.removesuffix("%"))
        if isinstance(value, str):
            expected = "a share of the steps, as 0.01 or 1%"
            raise UsageError("wrong-value", name="witness", value=text, expected=expected)
        share = value / 100 if text.endswith("%") else value
        return float(knob.number("witness", share, above=0, most=1))

    def _check_sync_every(self) -> None:
        steps = self.sync_every
        outer = self.local
        if steps is None or outer is None:
            if self.outer is not None:
                raise UsageError("outer-without-sync-every", outer=self.outer)
            return
        if outer.fragments > steps:
            raise UsageError(
                "too-many-fragments", outer=self.outer, sync_every=steps, fragments=outer.fragments
            )
        if outer.overlap >= steps:
            raise UsageError(
                "overlap-too-long", outer=self.outer, sync_every=steps, overlap=outer.overlap
            )

    def _check_staleness(self) -> None:
        if self.staleness is None:
            return
        if not self.server:
            raise UsageError("staleness-without-server", staleness=self.staleness)
        value = _number(self.staleness)
        if value != math.inf:
            knob.whole("staleness", value, 0, unit="steps (or inf)")

    def _refusals(self) -> dict[str, bool]:
        """Return all invalid combinations: the code of each error, and whether it applies here."""
        local = self.sync_every is not None
        compressed = self.compress is not None
        sharded = self.update == "sharded"
        mesh = self.mesh or Mesh()
        split = not mesh.only_data
        own_order = ("central", "ring", "tree", "halving_doubling", "hierarchical")
        return {
            "exact-with-reduce": self.exact and self.reduce in own_order,
            "exact-with-compress": self.exact and compressed,
            "exact-with-sync-every": self.exact and local,
            "exact-with-server": self.exact and self.server,
            "witness-without-exact": self.witnessed > 0 and not self.exact,
            "compress-with-reduce": compressed and self.reduce not in ("auto", "native"),
            "weights-with-update": self.weights == "shared" and not sharded,
            "sync-every-with-update": local and self.update != "replicated",
            "mesh-with-exact": split and self.exact,
            "mesh-with-compress": split and compressed,
            "mesh-with-sync-every": split and local,
            "mesh-with-server": split and self.server,
            "mesh-shard-with-pipeline": mesh.shard > 1 and mesh.pipeline > 1,
            "mesh-already-sharded": sharded and (mesh.shard > 1 or mesh.tensor > 1),
            "server-with-compress": self.server and compressed,
            "server-with-reduce": self.server and self.reduce != "auto",
        }

    @property
    def alone(self) -> bool:
        """Whether each rank steps, or pushes to a server, with its own gradients only: gradients
        are not summed over ranks in a step.
        """
        return self.sync_every is not None or self.server

    def alone_after(self, steps: int) -> bool:
        """Whether each rank takes the step after `steps` steps alone: local steps can begin later."""
        return self.alone and (self.local is None or steps >= self.local.after)

    @property
    def world_size_free(self) -> bool:
        """Whether the number of ranks has no effect on the result, beyond the rounding of sums."""
        return not self.alone and self.compress is None

    def recipe(self) -> dict[str, Any]:
        """Return the options that decide the weights, beyond the rounding of sums. Empty for plain
        data parallelism.
        """
        recipe: dict[str, Any] = {}
        if self.compression is not None:
            recipe["compress"] = str(self.compression)
        if self.local is not None:
            recipe |= {"sync_every": self.sync_every, "outer": str(self.local)}
        if self.server:
            recipe |= {"update": self.update, "staleness": str(self.bound)}
        return recipe

    @property
    def bound(self) -> float:
        """The maximum staleness, in steps."""
        return DEFAULT_STALENESS if self.staleness is None else float(self.staleness)

    def describe(self) -> str:
        """Return a short description of how parameters are updated."""
        if self.local is not None:
            return f"local steps, synchronized every {self.sync_every} steps, {self.local}"
        if self.server:
            bound = "no bound" if math.isinf(self.bound) else f"staleness {self.bound:g}"
            return f"{self.update}, {bound}"
        return self.update  # compression is in the name of the reduction
