"""Every algorithm over real ranks, with different data on each, against what the definition
says; and what happens where it goes wrong.
"""

from __future__ import annotations

import itertools
import os
import signal
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep import collectives
from lockstep.collectives import by_schedule, in_process
from lockstep.collectives.algorithms import algorithms_of
from lockstep.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
    UsageError,
    WorkerFailed,
)
from lockstep.testing import run_ranks

WORKERS = [1, 2, 3, 4, 5, 8]
# whose lengths are several; how a tensor is cut does not depend on its dtype
LONG = {torch.float32, torch.float16, torch.int32}
SUMS = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.complex64,
]


def names(kind: Any) -> list[Any]:
    return ["native", "auto", *algorithms_of(kind)]


def forbid_c10d() -> None:
    """From here on only messages between two ranks: what is written out must not lean on the
    backend's collectives.
    """

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a hand-written algorithm called a collective of torch.distributed")

    for name in (
        "all_reduce",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "reduce_scatter",
        "all_to_all",
        "all_to_all_single",
    ):
        setattr(dist, name, refuse)


def values(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    return torch.arange(1, count + 1).add(3 * rank).remainder(7).to(dtype)


def reduces(world: lockstep.World, algorithms: list[Any], patched: bool) -> list[str]:
    if patched:
        forbid_c10d()
    world.group.ranks_per_node = 2
    wrong = []
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
            collectives.all_reduce(tensor, op, algorithm=algorithm)
            tolerance = {torch.bfloat16: 3e-2, torch.float16: 3e-3}.get(dtype, 1e-6) * (not exact)
            if not torch.allclose(tensor.to(value.dtype), value, rtol=tolerance, atol=0):
                wrong.append(f"{algorithm} {op} {dtype} {count}: {tensor[:4]} for {value[:4]}")
    return wrong


def both(world: lockstep.World) -> tuple[list[str], list[str]]:
    return reduces(world, names("all_reduce"), False), moves(world)


@cache
def found_wrong(workers: int) -> tuple[list[list[str]], list[list[str]]]:
    """By `reduces` and by `moves` on each rank: the ranks start once for both tests."""
    reduced, moved = zip(*run_ranks(both, workers), strict=True)
    return list(reduced), list(moved)


@pytest.mark.parametrize("workers", WORKERS)
def test_every_all_reduce_is_what_its_name_says(workers: int) -> None:
    assert found_wrong(workers)[0] == [[]] * workers


def test_written_out_algorithms_use_messages_only() -> None:
    assert run_ranks(reduces, 3, args=(algorithms_of("all_reduce"), True)) == [[]] * 3
    assert run_ranks(moves, 3, args=(True,)) == [[]] * 3


def moves(world: lockstep.World, patched: bool = False) -> list[str]:
    rank, size = world.rank, world.size
    wrong = []

    def check(what: str, right: bool) -> None:
        if not right:
            wrong.append(what)

    def of(kind: Any) -> list[Any]:
        return algorithms_of(kind) if patched else names(kind)

    row = torch.arange(10.0).view(5, 2)
    for root in sorted({0, size // 2, size - 1}):
        for name in of("broadcast"):
            for tensor in (
                row.t().clone().t() + rank,
                (row + rank).bool(),
                torch.tensor(2.5 * rank),
                torch.empty(0, 2),
            ):
                expected = [
                    row + root,
                    (row + root).bool(),
                    torch.tensor(2.5 * root),
                    torch.empty(0, 2),
                ]
                collectives.broadcast(tensor, root, algorithm=name)
                check(
                    f"broadcast {name} {root}",
                    any(
                        torch.equal(tensor, each) for each in expected if each.dtype == tensor.dtype
                    ),
                )
        for name in of("reduce"):
            tensor = row + rank
            collectives.reduce(tensor, root, algorithm=name)
            total = size * row + sum(range(size))
            check(
                f"reduce {name} {root}", torch.equal(tensor, total if rank == root else row + rank)
            )
        for name in of("gather"):
            found = collectives.gather(torch.full((rank + 1, 2), rank), root, algorithm=name)
            every = [torch.full((other + 1, 2), other) for other in range(size)]
            check(
                f"gather {name} {root}",
                found is None if rank != root else all(map(torch.equal, found, every)),
            )
        for name in of("scatter"):
            pieces = (
                [torch.full((other, 3), other + 0.5, dtype=torch.float64) for other in range(size)]
                if rank == root
                else None
            )
            found = collectives.scatter(pieces, root, algorithm=name)
            check(
                f"scatter {name} {root}",
                torch.equal(found, torch.full((rank, 3), rank + 0.5, dtype=torch.float64)),
            )
    for name in of("all_gather"):
        every = [torch.full((other % 3, 2), other, dtype=torch.int16) for other in range(size)]
        check(
            f"all_gather {name}",
            torch.equal(collectives.all_gather(every[rank], algorithm=name), torch.cat(every)),
        )
        check(
            f"all_gather list {name}",
            all(
                map(
                    torch.equal,
                    collectives.all_gather(every[rank], as_list=True, algorithm=name),
                    every,
                )
            ),
        )
        check(
            f"all_gather 0-d {name}",
            collectives.all_gather(torch.tensor(rank), algorithm=name).tolist()
            == list(range(size)),
        )
    for name in of("reduce_scatter"):
        tensor = torch.arange(14).view(7, 2) + rank
        total = (torch.arange(14).view(7, 2) * size + sum(range(size))).tensor_split(size)[rank]
        check(
            f"reduce_scatter {name}",
            torch.equal(collectives.reduce_scatter(tensor, algorithm=name), total),
        )
        check(
            f"reduce_scatter {name} changed its input",
            torch.equal(tensor, torch.arange(14).view(7, 2) + rank),
        )
        mean = collectives.reduce_scatter(tensor.double(), "mean", algorithm=name)
        check(f"reduce_scatter mean {name}", torch.allclose(mean, total.double() / size))
    for name in of("all_to_all"):
        found = collectives.all_to_all(
            [torch.full((rank + 1, other), 10 * rank + other) for other in range(size)],
            algorithm=name,
        )
        check(
            f"all_to_all {name}",
            all(
                torch.equal(each, torch.full((other + 1, rank), 10 * other + rank))
                for other, each in enumerate(found)
            ),
        )
    return wrong


@pytest.mark.parametrize("workers", WORKERS)
def test_everything_arrives_where_it_belongs(workers: int) -> None:
    assert found_wrong(workers)[1] == [[]] * workers


def bits(world: lockstep.World, count: int) -> dict[str, Tensor]:
    world.group.ranks_per_node = 2
    found = {}
    for name in algorithms_of("all_reduce"):
        found[name] = noise(world.rank, count)
        collectives.all_reduce(found[name], "mean", algorithm=name)  # type: ignore[arg-type]
    return found


def noise(rank: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    ("workers", "count"), [(2, 3_000_000), (3, 1001), (4, 1001), (5, 1001), (8, 1001)]
)
def test_the_same_bits_as_in_one_process(workers: int, count: int) -> None:
    everyone = run_ranks(bits, workers, args=(count,))
    for name in algorithms_of("all_reduce"):
        ours = [noise(rank, count) for rank in range(workers)]
        if count > 1_000_000:  # in lanes: each piece goes through the schedule by itself
            assert torch.allclose(everyone[0][name], torch.stack(ours).mean(0), atol=1e-6)
        else:
            in_process.all_reduce(ours, "mean", name, ranks_per_node=2)
            assert torch.equal(everyone[0][name], ours[0]), name
        assert all(torch.equal(found[name], everyone[0][name]) for found in everyone), name


def in_flight(world: lockstep.World) -> list[float]:
    """Several at once, of different algorithms, waited for in another order on every rank."""
    tensors = [torch.full((50_000,), float(number + world.rank)) for number in range(5)]
    kinds: list[Any] = ["ring", "native", "tree", "direct", "halving_doubling"]
    handles = [
        collectives.all_reduce(tensor, algorithm=kind, async_op=True)
        for tensor, kind in zip(tensors, kinds, strict=True)
    ]
    gathered = collectives.gather(torch.tensor([world.rank]), algorithm="tree", async_op=True)
    order = list(range(5))
    for number in order[world.rank :] + order[: world.rank]:
        assert handles[number].wait() is tensors[number]
    every = gathered.wait()
    assert (every is None) == (world.rank != 0)
    return [tensor.unique().item() for tensor in tensors]


def test_several_are_in_flight_at_once() -> None:
    assert run_ranks(in_flight, 3) == [[3.0 * number + 3 for number in range(5)]] * 3


def in_subgroups(world: lockstep.World) -> tuple[float, float, str]:
    pair = world.subgroup([0, 2]) if world.rank in (0, 2) else world.subgroup([3, 1])
    tensor = torch.tensor([float(world.rank)])
    for name in names("all_reduce"):
        if name != "hierarchical":
            collectives.all_reduce(tensor, "max", algorithm=name, group=pair)
    root = collectives.broadcast(torch.tensor([float(world.rank)]), 1, group=pair).item()
    try:
        collectives.broadcast(tensor, 2, group=pair)
        refused = ""
    except UsageError as error:
        refused = f"{error.code} {error.values}"
    return tensor.item(), root, refused


def test_subgroups_and_roots_inside_them() -> None:
    sentence = "root-outside-group {'root': 2, 'size': 2, 'last': 1}"
    assert run_ranks(in_subgroups, 4) == [
        (2.0, 2.0, sentence),
        (3.0, 1.0, sentence),
        (2.0, 2.0, sentence),
        (3.0, 1.0, sentence),
    ]


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


@pytest.mark.parametrize("algorithm", ["ring", "tree", "central"])
def test_a_rank_that_dies_in_the_middle_is_an_error_not_a_hang(algorithm: str) -> None:
    with pytest.raises(WorkerFailed) as failed:
        run_ranks(dies, 3, args=(algorithm,))
    assert (failed.value.rank, "SIGKILL" in str(failed.value)) == (1, True)


def mismatches(world: lockstep.World) -> list[str]:
    said = []
    attempts: list[Any] = [
        lambda: collectives.all_reduce(torch.ones(3), algorithm="ring" if world.rank else "tree"),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("nothing")
        except (CollectiveMismatch, CollectiveTimeout) as error:
            said.append(str(error))
    world.close(failed=True)
    return said


def test_different_algorithms_are_a_mismatch() -> None:
    for (said,) in run_ranks(mismatches, 2):
        assert said.startswith(
            "#1: rank 0 all_reduce sum by tree f32[3] at test_over_processes.py:"
        )
        assert said.endswith("[collective-mismatch]")


def gathers_unlike(world: lockstep.World) -> str:
    try:
        collectives.gather(torch.ones(2, 3 if world.rank else 4))
    except CollectiveMismatch as error:
        world.close(failed=True)
        return str(error)
    return "nothing"


def test_shapes_that_differ_behind_dim_0_are_a_mismatch() -> None:
    for said in run_ranks(gathers_unlike, 2):
        assert said.startswith("#1: rank 0 gather f32[*,4] at test_over_processes.py:")


def refusals(world: lockstep.World) -> list[tuple[str, dict[str, Any]]]:
    said = []
    attempts: list[Any] = [
        lambda: collectives.all_reduce(torch.ones(2), algorithm="rign"),
        lambda: collectives.broadcast(torch.ones(2), algorithm="ring"),
        lambda: collectives.all_reduce(torch.ones(2, dtype=torch.int64), "mean"),
        lambda: collectives.all_reduce(torch.ones(2, dtype=torch.bool)),
        lambda: collectives.all_reduce(torch.ones(2, dtype=torch.complex64), "max"),
        lambda: collectives.all_reduce(torch.ones(2), "median"),
        lambda: collectives.reduce(torch.ones(2), root=1),
        lambda: collectives.scatter(None),
        lambda: collectives.scatter([torch.ones(1), torch.ones(1)]),
        lambda: collectives.all_to_all([torch.ones(1), torch.ones(1)]),
        lambda: collectives.reduce_scatter(torch.tensor(1.0)),
        lambda: collectives.all_reduce(torch.ones(2), group=object()),  # type: ignore[arg-type]
    ]
    for attempt in attempts:
        with pytest.raises(UsageError) as caught:
            attempt()
        said.append((caught.value.code, caught.value.values))
    assert collectives.all_reduce(torch.ones(2), dist.ReduceOp.SUM).tolist() == [1, 1]
    return said


def test_what_cannot_be_meant_is_refused() -> None:
    (said,) = run_ranks(refusals, 1)
    known = ["auto", "native", "central", "tree"]
    of_all_reduce = ["auto", "native", "central", "ring", "tree", "recursive_doubling"]
    of_all_reduce += ["halving_doubling", "direct", "hierarchical"]
    assert said == [
        (
            "unknown-algorithm",
            {"algorithm": "rign", "kind": "all_reduce", "choices": of_all_reduce},
        ),
        ("unknown-algorithm", {"algorithm": "ring", "kind": "broadcast", "choices": known}),
        ("mean-of-integers", {"dtype": "int64"}),
        ("op-of-bool", {"op": "sum"}),
        ("op-of-complex", {"op": "max", "dtype": "complex64"}),
        (
            "unknown-choice",
            {"name": "op", "value": "median", "choices": ["sum", "mean", "max", "min", "prod"]},
        ),
        ("root-outside-group", {"root": 1, "size": 1, "last": 0}),
        ("scatter-list-not-of-root", {"rank": 0, "what": "no list", "root": 0}),
        ("tensors-not-one-a-rank", {"kind": "scatter", "count": 2, "size": 1}),
        ("tensors-not-one-a-rank", {"kind": "all_to_all", "count": 2, "size": 1}),
        ("collective-without-rows", {}),
        ("not-a-member", {}),
    ]
