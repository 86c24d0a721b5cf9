"""Every collective and algorithm over real ranks, against what the definition says."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.checks.divergence import digest
from lockstep.collectives import by_schedule, in_process
from lockstep.errors import CollectiveMismatch, PeerFailed, WorkerFailed
from lockstep.schedules.algorithms import algorithms_of
from lockstep.testing import run_ranks
from tests.collectives.own_groups import group_of_its_own
from tests.refused import refused
from tests.teams import on_team

# whose lengths are several; how a tensor is cut does not depend on its dtype
LONG = {torch.float32, torch.float16, torch.int32}


SUMS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SUMS += [torch.int64, torch.int32, torch.int16, torch.uint8]
C10D = ["all_reduce", "broadcast", "reduce", "gather", "scatter", "reduce_scatter"]
C10D += ["all_to_all", "all_to_all_single"]


def names(kind: Any) -> list[Any]:
    return ["native", "auto", *algorithms_of(kind)]


def values(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    return torch.arange(1, count + 1).add(3 * rank).remainder(7).to(dtype)


def check(text: str, result: Any, expected: Any, *, relative: float = 0.0) -> None:
    torch.testing.assert_close(
        result, expected, rtol=relative, atol=0, msg=lambda difference: f"{text}: {difference}"
    )


def reduces(world: lockstep.World, algorithms: list[Any]) -> None:
    size = world.size
    for algorithm, dtype, count in itertools.product(algorithms, SUMS, (0, 7, 5000)):
        if count != 7 and dtype not in LONG:
            continue
        stacked = torch.stack([values(rank, dtype, count) for rank in range(size)])
        wide = stacked.to(torch.complex128 if dtype.is_complex else torch.float64)
        expected = {"sum": wide.sum(0)}
        if not dtype.is_complex:
            expected |= {"max": wide.amax(0), "min": wide.amin(0)} if count else {}
            expected["prod"] = wide.prod(0)
        if dtype.is_floating_point:
            expected["mean"] = wide.mean(0)
        exact = not (dtype.is_floating_point or dtype.is_complex)
        for op, value in expected.items():
            if exact:
                value = value.to(torch.int64).to(dtype).to(torch.float64)  # products wrap round
            tensor = values(world.rank, dtype, count)
            assert collectives.all_reduce(tensor, op, algorithm=algorithm) is tensor
            tolerance = {torch.bfloat16: 3e-2, torch.float16: 3e-3}.get(dtype, 1e-6) * (not exact)
            check(
                f"{algorithm} {op} {dtype} {count}",
                tensor.to(value.dtype),
                value,
                relative=tolerance,
            )
    for algorithm in algorithms:
        plain = torch.arange(24.0).view(4, 6)
        strided, scalar = plain * (world.rank + 1), torch.tensor(float(world.rank))
        collectives.all_reduce(strided.t()[::2], algorithm=algorithm)
        collectives.all_reduce(scalar, algorithm=algorithm)
        expected_view = plain * (world.rank + 1)
        expected_view[:, ::2] = plain[:, ::2] * sum(range(1, size + 1))
        check(f"{algorithm} of a view", strided, expected_view)
        check(f"{algorithm} of a scalar", scalar.item(), float(sum(range(size))))


def moves(world: lockstep.World, names: Callable[[Any], list[Any]]) -> None:
    rank, size = world.rank, world.size
    rows = torch.arange(10.0).view(5, 2)
    for root in sorted({0, size // 2, size - 1}):
        for name in names("broadcast"):
            for tensor_of in (
                lambda rank: rows.t().clone().t() + rank,
                lambda rank: (rows + rank).bool(),
                lambda rank: torch.tensor(2.5 * rank),
                lambda rank: torch.empty(0, 2),
            ):
                tensor = collectives.broadcast(tensor_of(rank), root, algorithm=name)
                check(f"broadcast {name} {root}", tensor, tensor_of(root))
            columns = torch.full((3, 2), float(rank))
            collectives.broadcast(columns[:, 1], root, algorithm=name)
            check(f"broadcast of a column {name}", columns, torch.tensor([[float(rank), root]] * 3))
        for name in names("reduce"):
            tensor = collectives.reduce(rows + rank, root, algorithm=name)
            total = size * rows + sum(range(size))
            check(f"reduce {name} {root}", tensor, total if rank == root else rows + rank)
        for name in names("gather"):
            gathered = collectives.gather(torch.full((rank + 1, 2), rank), root, algorithm=name)
            pieces = [torch.full((other + 1, 2), other) for other in range(size)]
            check(f"gather {name} {root}", gathered, pieces if rank == root else None)
        for name in names("scatter"):
            pieces = [torch.full((other, 3), other + 0.5).double() for other in range(size)]
            piece = collectives.scatter(pieces if rank == root else None, root, algorithm=name)
            check(f"scatter {name} {root}", piece, pieces[rank])
    for name in names("all_gather"):
        pieces = [torch.full((other % 3, 2), other, dtype=torch.int16) for other in range(size)]
        joined = collectives.all_gather(pieces[rank], algorithm=name)
        check(f"all_gather {name}", joined, torch.cat(pieces))
        listed = collectives.all_gather(pieces[rank], as_list=True, algorithm=name)
        check(f"all_gather list {name}", listed, pieces)
        scalars = collectives.all_gather(torch.tensor(rank), algorithm=name)
        check(f"all_gather 0-d {name}", scalars.tolist(), list(range(size)))
    for name in names("reduce_scatter"):
        plain = torch.arange(14).view(7, 2)
        tensor = plain + rank
        total = (plain * size + sum(range(size))).tensor_split(size)[rank]
        piece = collectives.reduce_scatter(tensor, algorithm=name)
        check(f"reduce_scatter {name}", piece, total)
        check(f"reduce_scatter {name} keeps its input", tensor, plain + rank)
        mean = collectives.reduce_scatter(tensor.double(), "mean", algorithm=name)
        check(f"reduce_scatter mean {name}", mean, total.double() / size, relative=1e-6)
    for name in names("all_to_all"):
        leaving = [torch.full((rank + 1, other), 10 * rank + other) for other in range(size)]
        arrived = collectives.all_to_all(leaving, algorithm=name)
        pieces = [torch.full((other + 1, rank), 10 * other + rank) for other in range(size)]
        check(f"all_to_all {name}", arrived, pieces)


def every_collective(world: lockstep.World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.group, "ranks_per_node", 2)
        reduces(world, names("all_reduce"))
        moves(world, names)
        if world.size == 4:
            # what is written out does not lean on the backend's collectives
            for name in C10D:
                patch.setattr(dist, name, None)
            reduces(world, algorithms_of("all_reduce"))
            moves(world, algorithms_of)


@pytest.mark.parametrize(
    "workers", [4, *(pytest.param(size, marks=pytest.mark.rest) for size in (2, 3, 5, 8))]
)
def test_every_collective_is_what_its_name_says(workers: int) -> None:
    on_team(every_collective, workers)


def test_every_collective_of_one_rank() -> None:
    with lockstep.init(backend="gloo") as world:
        every_collective(world)
        # torch's own operations are taken
        assert collectives.all_reduce(torch.ones(2), dist.ReduceOp.SUM).tolist() == [1, 1]
    with refused("no-world-open"):
        collectives.all_reduce(torch.zeros(1))


def noise(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def bits(world: lockstep.World, count: int) -> dict[str, int]:
    """A digest of the mean by each algorithm."""
    everyones = [noise(rank, count) for rank in range(world.size)]
    expected, digests = torch.stack(everyones).mean(0), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.group, "ranks_per_node", 2)
        for name in algorithms_of("all_reduce"):
            mean = everyones[world.rank].clone()
            collectives.all_reduce(mean, "mean", algorithm=name)  # type: ignore[call-overload]
            torch.testing.assert_close(mean, expected, rtol=0, atol=1e-6, msg=name)
            digests[name] = digest([mean])
    return digests


@pytest.mark.parametrize(
    ("workers", "count"),
    [
        (2, 1_100_000),  # in lanes: each piece goes through the schedule by itself
        (3, 1001),
        (8, 1001),
        pytest.param(4, 1001, marks=pytest.mark.rest),
        pytest.param(5, 1001, marks=pytest.mark.rest),
    ],
)
def test_the_same_bits_as_in_one_process(workers: int, count: int) -> None:
    first, *others = on_team(bits, workers, (count,))
    assert others == [first] * (workers - 1)
    for name in algorithms_of("all_reduce") if count == 1001 else ():
        ours = [noise(rank, count) for rank in range(workers)]
        in_process.all_reduce(ours, "mean", name, ranks_per_node=2)
        assert first[name] == digest(ours[:1]), name


def in_flight(world: lockstep.World) -> list[float]:
    """Several at once, of different algorithms, waited for in another order on every rank."""
    kinds: list[Any] = ["ring", "native", "tree", "direct", "halving_doubling"]
    with group_of_its_own(world) as group:
        tensors = [torch.full((50_000,), float(number + world.rank)) for number in range(5)]
        handles = [
            collectives.all_reduce(tensor, "mean", algorithm=kind, group=group, async_op=True)
            for tensor, kind in zip(tensors, kinds, strict=True)
        ]
        gathered = collectives.gather(
            torch.tensor([world.rank]), algorithm="tree", group=group, async_op=True
        )
        order = list(range(5))
        for number in order[world.rank :] + order[: world.rank]:
            assert handles[number].wait() is tensors[number]
        assert (gathered.wait() is None) == (world.rank != 0)
    return [tensor.unique().item() for tensor in tensors]


def test_several_are_in_flight_at_once_and_a_mean_divides_once() -> None:
    assert on_team(in_flight, 3) == [[number + 1.0 for number in range(5)]] * 3


def in_subgroups(world: lockstep.World) -> tuple[float, float, list[float]]:
    with refused("not-in-subgroup"):
        world.subgroup([(world.rank + 1) % 3])
    with group_of_its_own(world, [2, 0], [1]) as group:
        tensor = torch.tensor([float(world.rank)])
        for name in names("all_reduce"):
            if name != "hierarchical":
                collectives.all_reduce(tensor, "max", algorithm=name, group=group)
        last = torch.tensor([float(world.rank)])
        collectives.broadcast(last, group.size - 1, group=group)
        gathered = collectives.all_gather(torch.tensor(float(world.rank)), group=group).tolist()
        with refused("root-outside-group", root=2, size=group.size, last=group.size - 1):
            collectives.broadcast(tensor, 2, group=group)
    return tensor.item(), last.item(), gathered


def test_subgroups_count_in_their_own_order() -> None:
    pair, single = (2.0, 0.0, [2.0, 0.0]), (1.0, 1.0, [1.0])
    assert on_team(in_subgroups, 3) == [pair, single, pair]


def dies(world: lockstep.World, algorithm: Any) -> None:
    tensor = torch.ones(4_000_000)
    collectives.all_reduce(tensor, algorithm=algorithm)
    if world.rank == 1:
        # all have come, and then it goes
        by_schedule.execute = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerFailed) as caught:
        collectives.all_reduce(tensor, algorithm=algorithm)
    assert caught.value.code in ("peer-has-ended", "peer-left-collective")
    assert caught.value.values.get("peer", 1) == 1


def test_a_rank_that_dies_in_the_middle_is_an_error_not_a_hang() -> None:
    with pytest.raises(WorkerFailed) as failed:
        run_ranks(dies, 3, args=("ring",))
    assert (failed.value.rank, "SIGKILL" in str(failed.value)) == (1, True)


def mismatches(world: lockstep.World) -> list[str]:
    calls = []
    for attempt in (
        lambda group: collectives.all_reduce(
            torch.ones(3), algorithm="ring" if world.rank else "tree", group=group
        ),
        lambda group: collectives.gather(torch.ones(2, 3 if world.rank else 4), group=group),
    ):
        with (
            group_of_its_own(world) as group,
            refused("collective-mismatch", CollectiveMismatch, number=1) as refusal,
        ):
            attempt(group)
        calls.append(refusal.value.values["calls"])
    return calls


def test_other_algorithms_and_shapes_that_differ_behind_dim_0_are_a_mismatch() -> None:
    for by_other_algorithm, of_other_shape in on_team(mismatches, 2):
        assert by_other_algorithm.startswith("rank 0 all_reduce sum by tree f32[3] at test_over_")
        assert of_other_shape.startswith("rank 0 gather f32[*,4] at test_over_processes.py:")


ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("kind", "arguments", "more", "code", "values"),
    [
        ("all_reduce", (ONES,), {"algorithm": "rign"}, "unknown-algorithm", {"algorithm": "rign"}),
        ("broadcast", (ONES,), {"algorithm": "ring"}, "unknown-algorithm", {"kind": "broadcast"}),
        ("all_reduce", (ONES.long(), "mean"), {}, "mean-of-integers", {"dtype": "int64"}),
        ("all_reduce", (ONES.bool(),), {}, "op-of-bool", {"op": "sum"}),
        ("all_reduce", (ONES.cfloat(), "max"), {}, "op-of-complex", {"dtype": "complex64"}),
        ("all_reduce", (ONES, "median"), {}, "unknown-choice", {"name": "op", "value": "median"}),
        ("all_reduce", (torch.eye(3).to_sparse(),), {}, "op-of-sparse", {}),
        ("all_reduce", (ONES,), {"group": object()}, "not-a-member", {}),
        ("reduce", (ONES, 1), {}, "root-outside-group", {"root": 1, "size": 1, "last": 0}),
        ("scatter", (None,), {}, "scatter-list-not-of-root", {"what": "no list", "root": 0}),
        ("scatter", ([ONES] * 2,), {}, "tensors-not-one-a-rank", {"kind": "scatter", "count": 2}),
        ("all_to_all", ([ONES] * 2,), {}, "tensors-not-one-a-rank", {"kind": "all_to_all"}),
        ("reduce_scatter", (torch.tensor(1.0),), {}, "collective-without-rows", {}),
    ],
)
def test_what_cannot_be_meant_is_refused(
    kind: str, arguments: tuple[Any, ...], more: dict[str, Any], code: str, values: dict[str, Any]
) -> None:
    with lockstep.init(backend="gloo"), refused(code, **values):
        getattr(collectives, kind)(*arguments, **more)
