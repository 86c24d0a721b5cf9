"""How the ranks' work becomes one training: which of the ways are chosen, and which of them go
together.

    reduce      how gradients are summed           compress    in how many bits they travel
    update      who applies them                   sync_every  how often replicas meet
    exact       in one order of addition, at any number of ranks
    mesh        who holds which part of the model

A choice that has options of its own is one text, `name:option=value,...`. No torch here: the
command line refuses before any rank starts.
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
CAST = ("bf16", "fp16")
COMPRESSIONS = (*CAST, "int8", "powersgd:RANK", "topk:SHARE")
UPDATES = ("replicated", "sharded", "server")
OUTERS = ("average", "nesterov")


@dataclass(frozen=True, slots=True)
class Compression:
    """`bf16`, `fp16`, `int8`, `powersgd:4` (the rank of the factors), `topk:0.01` (the share of
    elements that travel).
    """

    kind: str
    amount: float | None = None

    @classmethod
    @cache
    def read(cls, text: str) -> Compression:
        """Raises UsageError."""
        kind, colon, value = text.partition(":")
        if kind in ("powersgd", "topk") and colon:
            amount = _number("compress", value, text)
            if kind == "powersgd" and not (amount.is_integer() and amount >= 1):
                raise UsageError(
                    f"compress={text!r}: the rank of PowerSGD's factors is a whole number of at"
                    " least 1, as in powersgd:4"
                )
            if kind == "topk" and not 0 < amount <= 1:
                raise UsageError(
                    f"compress={text!r}: the share of elements that travel lies between 0 and 1, as"
                    " in topk:0.01"
                )
            return cls(kind, amount)
        if text not in (*CAST, "int8"):
            hints = {
                "powersgd": "say which rank, as in powersgd:4",
                "topk": "say which share, as in topk:0.01",
            }
            hint = (
                f": {hints[kind]}"
                if kind in hints
                else f" is unknown: choose one of {', '.join(COMPRESSIONS)}"
            )
            raise UsageError(f"compress={text!r}{hint}")
        return cls(text)

    def __str__(self) -> str:
        return self.kind if self.amount is None else f"{self.kind}:{self.amount:g}"


@dataclass(frozen=True, slots=True)
class Outer:
    """What a meeting makes of the replicas: their weighted average, or a step of SGD with
    Nesterov momentum along it (DiLoCo).
    """

    kind: str = "average"
    lr: float = 0.7
    """Of Nesterov's step; as `momentum`, the values of the DiLoCo paper."""
    momentum: float = 0.9
    after: int = 0
    """Steps that are taken with every gradient summed before local ones begin (post-local SGD)."""
    fragments: int = 1
    """Parts of the model that meet one after the other, spread over the steps between two
    meetings (Streaming DiLoCo).
    """
    overlap: int = 0
    """Steps that are computed while a meeting's sums travel."""

    def __post_init__(self) -> None:
        if self.kind not in OUTERS:
            raise UsageError(f"outer={self.kind!r} is unknown: choose one of {', '.join(OUTERS)}")
        if not 0 < self.lr < math.inf or not 0 <= self.momentum < 1:
            raise UsageError(
                f"outer={str(self)!r}: lr is a number above 0, momentum one from 0 to below 1"
            )
        for name, least in (("after", 0), ("fragments", 1), ("overlap", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(
                    f"outer={str(self)!r}: {name} is a whole number of at least {least}"
                )
        if self.kind == "average" and (self.lr, self.momentum) != (0.7, 0.9):
            raise UsageError(
                f"outer={str(self)!r}: an average has neither lr nor momentum; choose nesterov"
            )

    @classmethod
    @cache
    def read(cls, text: str) -> Outer:
        """`average`, `nesterov:lr=0.7,momentum=0.9`, `nesterov:fragments=4,overlap=2`,
        `average:after=100`. Raises UsageError.
        """
        kind, given = _options("outer", text)
        known = [each.name for each in fields(cls) if each.name != "kind"]
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known:
                raise UsageError(
                    f"outer={text!r}: there is no option {name!r}; there are {', '.join(known)}"
                )
            number = _number("outer", value, text)
            values[name] = (
                number if name in ("lr", "momentum") or not number.is_integer() else int(number)
            )
        return cls(kind, **values)

    def __str__(self) -> str:
        """As `read` takes it, without what is as always."""
        given = [
            f"{each.name}={getattr(self, each.name):g}"
            for each in fields(self)[1:]
            if getattr(self, each.name) != each.default
        ]
        return f"{self.kind}:{','.join(given)}" if given else self.kind


@dataclass(frozen=True, slots=True)
class Server:
    """An asynchronous parameter server."""

    shards: int | None = None
    """The first so many ranks hold the parameters; None: all. A rank that holds none can be done
    without when it dies.
    """
    lr: str = "constant"
    """by-age: a gradient that is `a` updates old is taken with 1 / (1 + a) of the learning rate."""

    @classmethod
    @cache
    def read(cls, text: str) -> Server:
        """`server`, `server:shards=1`, `server:lr=by-age`. Raises UsageError."""
        _, given = _options("update", text)
        shards = None
        for name, value in given.items():
            if name == "shards":
                number = _number("update", value, text)
                if number < 1 or not number.is_integer():
                    raise UsageError(f"update={text!r}: shards is a whole number of at least 1")
                shards = int(number)
            elif name != "lr" or value not in ("constant", "by-age"):
                raise UsageError(f"update={text!r}: server has the options shards=N and lr=by-age")
        return cls(shards, given.get("lr", "constant"))


def _options(name: str, text: str) -> tuple[str, dict[str, str]]:
    kind, colon, rest = text.partition(":")
    given: dict[str, str] = {}
    for pair in rest.split(",") if colon else ():
        key, equals, value = pair.partition("=")
        if not equals or key in given:
            raise UsageError(
                f"{name}={text!r}: options are written {kind}:name=value,name=value, each once"
            )
        given[key] = value
    return kind, given


def _number(name: str, value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name}={text!r}: {value!r} is no number")
    return number


DEFAULT_STALENESS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Raises UsageError, in one sentence, for values that cannot work and for choices that make
    no sense together.
    """

    reduce: Annotated[Reduce, Knob("gradients", tuned=True)] = "auto"
    """Algorithm that sums gradients; auto takes shared memory on one CPU host."""
    exact: Annotated[bool, Knob("gradients", common=True)] = False
    """Give the same bits at any number of workers: one order of addition, deterministic
    algorithms.
    """
    compress: Annotated[
        str | None,
        Knob("gradients", unit="bf16|fp16|int8|powersgd:RANK|topk:SHARE", default="no compression"),
    ] = None
    """Compress gradients before they travel."""
    update: Annotated[str, Knob("gradients", unit="replicated|sharded|server", tuned=True)] = (
        "replicated"
    )
    """Who applies the update: every rank, each rank its share, or an asynchronous server."""
    staleness: Annotated[
        int | float | str | None, Knob("gradients", unit="STEPS|inf", default="4")
    ] = None
    """Maximum steps a worker may run ahead of the slowest (server only)."""
    sync_every: Annotated[
        int | None, Knob("gradients", unit="STEPS", least=1, default="every step")
    ] = None
    """Steps each rank takes alone before the replicas synchronize."""
    outer: Annotated[str | None, Knob("gradients", unit="average|nesterov", default="average")] = (
        None
    )
    """Outer optimizer that joins the replicas when they synchronize."""
    mesh: Annotated[Mesh | None, Knob("model split", unit="AXIS=N,...")] = None
    """Ranks along data, shard, pipeline and tensor, such as data=2,pipeline=2; their product is
    --workers.
    """

    def __post_init__(self) -> None:
        for name, value in (("compress", self.compress), ("outer", self.outer)):
            if value is not None:
                # an object of its own class is as good as its text
                object.__setattr__(self, name, str(value))
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            object.__setattr__(self, "mesh", Mesh.read(self.mesh))
        knob.check(self)
        kind = self.update.partition(":")[0]
        if (kind if kind == "server" else self.update) not in UPDATES:
            raise UsageError(
                f"update={self.update!r} is unknown: choose one of {', '.join(UPDATES)}"
            )
        if kind == "server":
            Server.read(self.update)
        if self.compress is not None:
            Compression.read(self.compress)
        self._check_sync_every()
        self._check_staleness()
        for problem in self._refusals():
            raise UsageError(problem)

    @property
    def compression(self) -> Compression | None:
        return None if self.compress is None else Compression.read(self.compress)

    @property
    def local(self) -> Outer | None:
        """How replicas synchronize that step alone; None: gradients are summed in every step."""
        return None if self.sync_every is None else Outer.read(self.outer or "average")

    @property
    def server(self) -> Server | None:
        return Server.read(self.update) if self.update.startswith("server") else None

    def _check_sync_every(self) -> None:
        every, local = self.sync_every, self.local
        if every is None or local is None:
            if self.outer is not None:
                raise UsageError(
                    f"outer={self.outer!r} says what a meeting does, and replicas that never part"
                    " have none: give sync_every too"
                )
            return
        if local.fragments > every:
            raise UsageError(
                f"outer={self.outer!r} with sync_every={every}: so many fragments do not fit"
                " between two meetings, one a step"
            )
        if local.overlap >= every:
            raise UsageError(
                f"outer={self.outer!r} with sync_every={every}: a meeting must be over before the"
                " next one of the same fragment"
            )

    def _check_staleness(self) -> None:
        if self.staleness is None:
            return
        if self.server is None:
            raise UsageError(
                f"staleness={self.staleness!r} bounds how far ranks are apart at a server: give"
                " update='server' too"
            )
        try:
            value = float(self.staleness)
        except (TypeError, ValueError):
            value = math.nan
        if (
            math.isnan(value)
            or value < 0
            or not (math.isinf(value) or value.is_integer())
            or isinstance(self.staleness, bool)
        ):
            raise UsageError(
                f"staleness={self.staleness!r}: give the steps that a rank may be ahead, a whole"
                " number from 0, or inf"
            )

    def _refusals(self) -> list[str]:
        """What makes no sense together."""
        found = []
        if self.exact:
            if self.reduce in ("central", "ring", "tree", "halving_doubling", "hierarchical"):
                found.append(
                    f"reduce={self.reduce!r} with exact: it adds in an order of its own; leave it"
                    " out, or choose native or shared_memory"
                )
            for what, given in (
                ("compress", self.compression and str(self.compression)),
                ("sync_every", self.sync_every),
                ("update", self.server and self.update),
            ):
                if given is not None:
                    found.append(
                        f"{what}={given!r} with exact: what it computes depends on the number of"
                        " workers, so the same bits on any number cannot be had"
                    )
        if self.compress is not None and self.reduce not in ("auto", "native"):
            found.append(
                f"compress={str(self.compression)!r} with reduce={self.reduce!r}: compressed"
                " gradients have carriers of their own; leave reduce out"
            )
        if self.sync_every is not None and self.update != "replicated":
            found.append(
                f"sync_every={self.sync_every} with update={self.update!r}: ranks that step alone"
                " each need a whole optimizer; choose replicated"
            )
        if self.mesh is not None and not self.mesh.only_data:
            found += self._refusals_of_a_mesh(self.mesh)
        if self.server is not None:
            if self.compress is not None:
                found.append(
                    f"compress={str(self.compression)!r} with update={self.update!r}: what a server"
                    " is told travels as it is; leave one out"
                )
            if self.reduce != "auto":
                found.append(
                    f"reduce={self.reduce!r} with update={self.update!r}: a server adds gradients"
                    " up itself; leave reduce out"
                )
        return found

    def _refusals_of_a_mesh(self, mesh: Mesh) -> list[str]:
        """Where a rank holds a part of the model only."""
        whole = {
            "exact": (self.exact or None, "torch's engines add up in orders of their own"),
            "compress": (
                self.compression and str(self.compression),
                "what is left out of a gradient is remembered for whole models only",
            ),
            "sync_every": (self.sync_every, "ranks that step alone each need a whole model"),
            "update": (self.server and self.update, "a server's workers each need a whole model"),
        }
        found = [
            f"{name}={value!r} with mesh={str(mesh)!r}: {why}; leave one out"
            for name, (value, why) in whole.items()
            if value is not None
        ]
        if mesh.shard > 1 and mesh.pipeline > 1:
            found.append(
                f"mesh={str(mesh)!r}: stages that run different micro-batches would gather"
                " parameters at different times; use data and pipeline with update='sharded', or"
                " shard without pipeline"
            )
        if self.update == "sharded" and (mesh.shard > 1 or mesh.tensor > 1):
            found.append(
                f"update='sharded' with mesh={str(mesh)!r}: parameters that are split already have"
                " no whole memory to cut; leave update out"
            )
        return found

    @property
    def alone(self) -> bool:
        """Whether a rank steps, or pushes, with gradients of its own: nothing is summed in a
        step.
        """
        return self.local is not None or self.server is not None

    @property
    def world_size_free(self) -> bool:
        """Whether the number of ranks enters the mathematics nowhere, beyond the rounding of a
        sum.
        """
        return not self.alone and self.compress is None

    def recipe(self) -> dict[str, Any]:
        """What of it decides the weights, beyond the rounding of a sum. Empty for data
        parallelism as everybody knows it.
        """
        given: dict[str, Any] = {
            "compress": self.compression and str(self.compression),
            "sync_every": self.sync_every,
        }
        given["outer"] = self.local and str(self.local)
        if self.server is not None:
            given |= {"update": self.update, "staleness": str(self.bound)}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def bound(self) -> float:
        """The staleness that is allowed."""
        return DEFAULT_STALENESS if self.staleness is None else float(self.staleness)

    def describe(self) -> str:
        """For the last line of a run: who updates, and what else is not the rule."""
        if self.local is not None:
            return f"local steps, meeting every {self.sync_every}, {self.local}"
        if self.server is not None:
            bound = "no bound" if math.isinf(self.bound) else f"staleness {self.bound:g}"
            return f"{self.update}, {bound}"
        return self.update  # what travels compressed says so itself, as the name of the reduction
