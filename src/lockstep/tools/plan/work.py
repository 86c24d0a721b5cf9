"""What a rank has to do in a step, as a simulation takes it: from what was measured of a task, among
any number of ranks, or from a table of models; and the part of it that a rank of a mesh has, of the
layers (pipeline), of every layer (tensor), of every parameter (shard).
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
# of a micro-batch's time: products for the inputs' gradients and for the weights', where a forward
# has one
BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """Of the rank that has most micro-batches. Seconds are means; raises UsageError for what
    cannot be.
    """

    forward: float
    """Of one micro-batch."""
    backward: float
    """Of one micro-batch."""
    micro_batches: int
    optimizer: float = 0.0
    other: float = 0.0
    """What a step takes besides, however many micro-batches it has: Python's part, records,
    checks.
    """
    spread: float = 0.0
    """Standard deviation of what a rank computes in a step, over its mean; independent from rank
    to rank.
    """
    in_turns: float = 1.0
    """Ranks that take turns on one core: who is done leaves it to the others, so only their sum
    can be late.
    """
    buckets: Sequence[Leaves] = ()
    """In the order in which they leave."""
    width: float = WIDTH
    """Bytes of an element of a gradient."""
    facts: int = 0
    """Bytes that ranks tell each other before the last backward of a step: weights, losses."""
    buffers: int = 0
    """Bytes that are averaged after the gradients in every step: BatchNorm's statistics."""
    loading: float = 0.0
    """Seconds that a rank's samples of a step take to load."""
    ahead: bool = False
    """Loading goes on beside the computation, on cores of its own."""
    samples: float = 0.0
    """Of a rank in a step: only a shared storage looks at them."""
    layers: int = 0
    """Blocks between which the model can be cut. Only a mesh with pipeline or tensor looks at
    it.
    """
    activation: float = 0.0
    """Bytes that go from one block to the next for one micro-batch. As `layers`."""

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
        """Of all gradients."""
        return self.width * self.elements

    @property
    def computation(self) -> float:
        """Seconds of forwards and backwards in a step."""
        return self.micro_batches * (self.forward + self.backward)


@dataclass(frozen=True, slots=True)
class MeshShare:
    """Of one rank. The gradients left are summed over `data` ranks, and where `shard` is above
    1, scattered over those before.
    """

    work: RankWork
    data: Network
    """Between the ranks that hold the same part."""
    shard: Network
    idle: float = 0.0
    """Seconds a step that a stage of a pipeline has nothing to do."""
    exposed: float = 0.0
    """Seconds a step that activations are under way, while nobody can compute."""
    sent: float = 0.0
    """Bytes of activations that a rank sends in a step."""


def check_mesh(mesh: Mesh, what: str, layers: int, counts: Iterable[int] = ()) -> None:
    """Raise a UsageError for axes that the equal layers of a model, or the numbers of ranks, do
    not allow.
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
    """The mesh of so many ranks, with as many replicas as there is room for; one rank is no
    mesh.
    """
    others = mesh.size // mesh.data
    return replace(mesh, data=workers // others) if workers > 1 else Mesh()


def share(work: RankWork, mesh: Mesh, network: Network) -> MeshShare:
    """Of a rank of the mesh; its micro-batches are those of its replica, which `work` says. Raises
    UsageError where the model's layers are not known.

    A pipeline runs as 1F1B or GPipe do: p - 1 of m + p - 1 turns are idle, and its gradients leave
    when all is over. A tensor axis sums activations twice in a layer's forward and twice in its
    backward (Shoeybi and others, Megatron-LM, 2019), and nothing is hidden behind these.
    """
    inner = mesh.pipeline * mesh.tensor
    # a rank updates what it keeps
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
    """How a step is dealt out."""

    base: int
    """The number of ranks that others are compared with: one that is small."""
    weak: bool = False
    """More ranks make the global batch larger: each keeps the micro-batches that it has at
    `base`.
    """
    per_host: int | None = 1
    """Ranks that share the cores of one host; None: all of them."""
    loaders: int = 0
    """Loader workers of each rank."""

    def on_host(self, workers: int) -> int:
        """Ranks that compute on one host at once."""
        return workers if self.per_host is None else min(workers, self.per_host)


def slots_of(sizes: Profile | Task) -> int:
    """Micro-batches of the task's own global batch."""
    return Plan(
        samples=sizes.global_batch, global_batch=sizes.global_batch, micro_batch=sizes.micro_batch
    ).slots


def sides(
    scaling: PlanScaling, counts: Iterable[int], slots: int, cores: int, device: str
) -> list[int]:
    """How many ranks must be profiled side by side: as many as share a host, but no more than it
    has cores. On GPUs nobody shares.
    """
    if device == "cuda":
        return [1]
    return sorted(
        {min(_computing(scaling, count, slots), cores) for count in (*counts, scaling.base)}
    )


def talking(scaling: PlanScaling, counts: Iterable[int], device: str) -> list[int]:
    """How many ranks of one host must be heard talking: those that share its cores, and where
    each has a host of its own, two.
    """
    if device == "cuda":
        return []
    return sorted({heard(scaling, count) for count in (*counts, scaling.base) if count > 1})


def heard(scaling: PlanScaling, workers: int) -> int:
    """The number of ranks whose messages stand for those of so many."""
    return max(2, scaling.on_host(workers))


def _computing(scaling: PlanScaling, workers: int, slots: int) -> int:
    """Ranks of one host that have something to do."""
    here = scaling.on_host(workers)
    return here if scaling.weak else min(here, slots)


def samples_of(profile: Profile, scaling: PlanScaling, workers: int) -> float:
    """Of all ranks in a step."""
    if not scaling.weak:
        return profile.global_batch
    return profile.global_batch * workers / scaling.base


def work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Of the rank that has most, among so many ranks, each with micro-batches of its own.

    More ranks than cores take turns on them: everything takes as many times as long.
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
    """Seconds of loading in a step, and whether it goes on beside the computation.

    Loader workers share the cores that the host's ranks leave over; where there are none, loading
    takes its time from the computation.
    """
    busy = here if profile.device == "cpu" else 0
    left = profile.cores - busy
    if not scaling.loaders or left <= 0:
        return alone, False
    return alone * here / min(left, scaling.loaders * here), True


def gradient_work_of(profile: Profile, scaling: PlanScaling, workers: int) -> RankWork:
    """Only its forwards, backwards and gradients: all that a ratio of communication to
    computation looks at.
    """
    found = work_of(profile, scaling, workers)
    return RankWork(
        forward=found.forward,
        backward=found.backward,
        micro_batches=found.micro_batches,
        buckets=found.buckets,
        width=found.width,
    )
