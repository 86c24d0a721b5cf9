"""The work of a rank in a step, as the simulation needs it. It comes from the profile of a task,
for any number of ranks, or from the table of models.

A rank of a mesh has a part of it: some layers (pipeline), a part of every layer (tensor), or a part
of every parameter (shard).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lockstep.collectives.network import Network
from lockstep.config import knob
from lockstep.config.mesh import Mesh
from lockstep.config.task import Task
from lockstep.data.windows import Plan
from lockstep.errors import UsageError
from lockstep.gradients.facts import numbers
from lockstep.tools.plan.carriers import cost, part
from lockstep.tools.timing.profile import Leaves, Profile

WIDTH = 4  # bytes of an element: float32
# share of a micro-batch's time: a backward has two products (for the gradients of the inputs and of
# the weights), a forward has one
BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Work of the rank that has the most micro-batches. Seconds are means. Raises UsageError for
    values out of range.
    """

    forward: float
    """Seconds of one micro-batch's forward."""
    backward: float
    """Seconds of one micro-batch's backward."""
    micro_batches: int
    optimizer: float = 0.0
    other: float = 0.0
    """Seconds per step that do not depend on the number of micro-batches: Python, records,
    checks.
    """
    spread: float = 0.0
    """Standard deviation of a rank's computation in a step, divided by its mean; independent from
    rank to rank.
    """
    in_turns: float = 1.0
    """Number of ranks that take turns on one core. A rank that is done leaves the core to the
    others, so only the sum of their times can be late.
    """
    buckets: Sequence[Leaves] = ()
    """Buckets in the order in which they leave."""
    width: float = WIDTH
    """Bytes per element of a gradient."""
    facts: int = 0
    """Bytes that ranks exchange before the last backward of a step: weights, losses."""
    buffers: int = 0
    """Bytes that are averaged after the gradients in every step: BatchNorm's statistics."""
    loading: float = 0.0
    """Seconds to load a rank's samples of a step."""
    ahead: bool = False
    """Whether loading runs in parallel to the computation, on other cores."""
    samples: float = 0.0
    """Samples of a rank in a step; used only if a shared storage limits their rate."""
    layers: int = 0
    """Number of blocks between which the model can be divided; used only by a mesh with pipeline
    or tensor.
    """
    activation: float = 0.0
    """Bytes that one block passes to the next for one micro-batch; used as `layers` is."""

    def __post_init__(self) -> None:
        for name in (
            "forward",
            "backward",
            "optimizer",
            "other",
            "spread",
            "loading",
            "samples",
            "activation",
        ):
            knob.number(name, getattr(self, name), least=0)
        knob.whole("micro_batches", self.micro_batches)
        for bucket in self.buckets:
            knob.number("ready", bucket.ready, least=0, most=1)

    @property
    def elements(self) -> int:
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def bytes(self) -> float:
        """Bytes of all gradients."""
        return self.width * self.elements

    @property
    def computation(self) -> float:
        """Seconds of forwards and backwards in a step."""
        return self.micro_batches * (self.forward + self.backward)


@dataclass(frozen=True, slots=True)
class MeshShare:
    """The work of one rank of a mesh. Gradients are reduce-scattered over the `shard` axis if there
    is one, then summed over the `data` axis.
    """

    work: RankWork
    data: Network
    """Network between the ranks that hold the same part of the model."""
    shard: Network
    """Network between the ranks of the shard axis."""
    idle: float = 0.0
    """Seconds per step in which a pipeline stage is idle."""
    exposed: float = 0.0
    """Seconds per step in which activations are sent and nothing is computed."""
    sent: float = 0.0
    """Bytes of activations that a rank sends in a step."""


def check_mesh(mesh: Mesh, what: str, layers: int, counts: Iterable[int] = ()) -> None:
    """Raise UsageError if the model's `layers` equal blocks, or the numbers of ranks `counts`, do
    not allow the mesh.
    """
    if mesh.pipeline * mesh.tensor > 1 and not layers:
        raise UsageError("mesh-not-planned", mesh=str(mesh), what=what)
    if mesh.pipeline > max(1, layers):
        raise UsageError("mesh-too-many-stages", mesh=str(mesh), what=what, layers=layers)
    others = mesh.size // mesh.data
    if wrong := sorted(count for count in counts if count % others):
        raise UsageError(
            "mesh-workers", mesh=str(mesh), workers=wrong, others=others, twice=2 * others
        )


def over(mesh: Mesh, workers: int) -> Mesh:
    """Return the mesh for `workers` ranks, with as many replicas as possible; an empty mesh for one
    rank.
    """
    others = mesh.size // mesh.data
    return replace(mesh, data=workers // others) if workers > 1 else Mesh()


def share(work: RankWork, mesh: Mesh, network: Network) -> MeshShare:
    """Return the share of one rank of the mesh. `work` is that of its whole replica, with all its
    micro-batches. Raises UsageError if the model's layers are unknown.

    With m micro-batches and p stages, a 1F1B or GPipe pipeline is idle in p - 1 of m + p - 1 turns,
    and sends its gradients at the end. A tensor axis sums activations twice in a layer's forward
    and twice in its backward (Shoeybi and others, Megatron-LM, 2019). These sums do not overlap
    with computation.
    """
    inner = mesh.pipeline * mesh.tensor
    # a rank updates only the parameters that it keeps
    work = replace(work, optimizer=work.optimizer / (inner * mesh.shard))
    data, shard = part(network, mesh.data, mesh.shard * inner), part(network, mesh.shard, inner)
    if inner == 1:
        return MeshShare(work, data, shard)
    check_mesh(mesh, "this model", work.layers)
    layers = work.layers / mesh.pipeline
    summed = cost(part(network, mesh.tensor, 1), "all_reduce", "ring", mesh.tensor)
    turns = work.micro_batches * 4 * layers
    hop = part(network, mesh.pipeline, mesh.tensor)
    far = mesh.pipeline * mesh.tensor > network.ranks_per_node
    link = hop.between if far else hop.within
    hops = 2 * (mesh.pipeline - 1)
    buckets = tuple(
        replace(
            each,
            elements=-(-each.elements // inner),
            tensors=(),
            ready=1.0 if mesh.pipeline > 1 else each.ready,
        )
        for each in work.buckets
    )
    mine = replace(
        work, forward=work.forward / inner, backward=work.backward / inner, buckets=buckets
    )
    return MeshShare(
        mine,
        data,
        shard,
        idle=(mesh.pipeline - 1) * (mine.forward + mine.backward),
        exposed=turns * summed.seconds(work.activation)
        + hops * (link.latency + work.activation / link.bandwidth),
        sent=turns * summed.sends * work.activation
        + (2 * work.micro_batches * work.activation if mesh.pipeline > 1 else 0.0),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanScaling:
    """How the work of a step depends on the number of ranks."""

    base: int
    """A small number of ranks, which efficiency is relative to."""
    weak: bool = False
    """Whether the global batch grows with the number of ranks: each rank then has as many
    micro-batches as with `base` ranks.
    """
    per_host: int | None = 1
    """Number of ranks that share the cores of one host; None: all ranks."""
    loaders: int = 0
    """Loader workers of each rank."""

    def on_host(self, workers: int) -> int:
        """Return the number of ranks on one host."""
        return workers if self.per_host is None else min(workers, self.per_host)


def slots_of(sizes: Profile | Task) -> int:
    """Return the number of micro-batches of the task's own global batch."""
    return Plan(
        samples=sizes.global_batch, global_batch=sizes.global_batch, micro_batch=sizes.micro_batch
    ).slots


def sides(
    scaling: PlanScaling, counts: Iterable[int], slots: int, cores: int, device: str
) -> list[int]:
    """Return the numbers of ranks to profile side by side: as many as share a host, but at most one
    per core. GPU ranks share nothing, so one is enough.
    """
    if device == "cuda":
        return [1]
    return sorted(
        {min(_computing(scaling, count, slots), cores) for count in (*counts, scaling.base)}
    )


def talking(scaling: PlanScaling, counts: Iterable[int], device: str) -> list[int]:
    """Return the numbers of ranks of one host whose messages must be timed: those that share its
    cores, but at least two.
    """
    if device == "cuda":
        return []
    return sorted({heard(scaling, count) for count in (*counts, scaling.base) if count > 1})


def heard(scaling: PlanScaling, workers: int) -> int:
    """Return the number of ranks of one host whose messages represent those of `workers` ranks."""
    return max(2, scaling.on_host(workers))


def _computing(scaling: PlanScaling, workers: int, slots: int) -> int:
    """Return the number of ranks of one host that have a micro-batch."""
    here = scaling.on_host(workers)
    return here if scaling.weak else min(here, slots)


def samples_of(profile: Profile, scaling: PlanScaling, workers: int) -> float:
    """Return the samples of all ranks in a step."""
    if not scaling.weak:
        return profile.global_batch
    return profile.global_batch * workers / scaling.base


def work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Return the work of the rank with the most micro-batches, among `workers` ranks.

    If a host has more ranks than cores, they take turns: all times grow in proportion.
    """
    here = _computing(scaling, workers, slots_of(profile))
    beside = 1 if profile.device == "cuda" else min(here, profile.cores)
    turns = 1.0 if profile.device == "cuda" else here / beside
    side = profile.side(beside)
    micro_batches = -(-slots_of(profile) // (scaling.base if scaling.weak else workers))
    loading, ahead = _loading(profile, scaling, here, micro_batches * side.loading)
    return RankWork(
        forward=turns * side.forward,
        backward=turns * side.backward,
        micro_batches=micro_batches,
        optimizer=turns * side.optimizer,
        other=turns * side.other,
        spread=side.spread,
        in_turns=turns,
        buckets=profile.buckets,
        width=profile.width,
        facts=8 * numbers(workers),
        buffers=profile.buffers,
        loading=loading if ahead else turns * loading,
        ahead=ahead,
        samples=samples_of(profile, scaling, workers) / workers,
    )


def _loading(profile: Profile, scaling: PlanScaling, here: int, alone: float) -> tuple[float, bool]:
    """Return the seconds of loading in a step, and whether it runs in parallel to the computation.

    Loader workers share the cores that the host's ranks do not use. If all are used, loading adds
    to the time of the step.
    """
    busy = here if profile.device == "cpu" else 0
    left = profile.cores - busy
    if not scaling.loaders or left <= 0:
        return alone, False
    return alone * here / min(left, scaling.loaders * here), True


def gradient_work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Return only forwards, backwards and gradients: all that a ratio of communication to
    computation needs.
    """
    found = work_of(profile, scaling, workers)
    return RankWork(
        forward=found.forward,
        backward=found.backward,
        micro_batches=found.micro_batches,
        buckets=found.buckets,
        width=found.width,
    )
