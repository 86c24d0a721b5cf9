"""torch.distributed on the "lockstep" backend, and torch's own wrapper with the communication
hook.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.errors import CollectiveMismatch, PeerFailed, UsageError
from lockstep.testing import run_ranks
from tests.refused import refused
from tests.world.siblings import run_siblings


def opened(world: lockstep.World, backend: str) -> tuple[int, int]:
    """A process group of torch's own, in the place of run_ranks' world."""
    world.close()
    if backend == "lockstep":
        import lockstep.backend  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size()


def run_cases(world: lockstep.World, backend: str, cases: dict[str, Callable[..., Any]]) -> Any:
    """What each case gives in one process group."""
    rank, size = opened(world, backend)
    warnings.simplefilter("ignore", FutureWarning)
    results = {}
    for name, case in cases.items():
        try:
            results[name] = case(rank, size)
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    # torch 2.13: a wrapper that is the last to hold gloo's group waits, with the GIL, for a thread
    # that wants the GIL
    gc.collect()
    dist.destroy_process_group()
    return results


# -- as over gloo --------------------------------------------------------------------------------


def everything(rank: int, size: int) -> list[Tensor]:
    """Every collective of torch.distributed, different data on each rank."""
    noise = torch.randint(
        -9, 9, (3, 2 * size), generator=torch.Generator().manual_seed(rank)
    ).float()
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            local = noise.to(dtype)
            dist.all_reduce(local, op)
            results.append(local)
    flags = torch.tensor([rank, 3])
    dist.all_reduce(flags, dist.ReduceOp.BOR)  # only gloo can
    results.append(flags)
    turned = noise.clone().t()
    dist.broadcast(turned, size - 1)
    results.append(turned.contiguous())
    several = [torch.zeros_like(noise) for _ in range(size)]
    dist.all_gather(several, noise)
    results += several
    rows = torch.zeros(3 * size, 2 * size)
    dist.all_gather_into_tensor(rows, noise)
    results.append(rows)
    part = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(part, noise.t().contiguous())
    results.append(part)
    dist.reduce_scatter(part, list(noise.t().contiguous().view(size, 2, 3)))
    results.append(part.clone())
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, torch.arange(float(size)) + 10 * rank)
    results.append(exchanged)
    dist.reduce(noise, 0)
    if rank == 0:
        results.append(noise)
    pieces = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), pieces)
    results += pieces or []
    received = torch.zeros(1)
    numbers = [torch.tensor([float(other)]) for other in range(size)]
    dist.scatter(received, numbers if rank == 0 else None)
    results.append(received)
    names: list[Any] = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    assert names == [f"rank {other}" for other in range(size)]
    work = dist.all_reduce(received, async_op=True)
    assert work is not None
    work.wait()
    results.append(received)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(received, 0)
    evens = dist.new_group(list(range(0, size, 2)))
    if rank % 2 == 0:
        dist.all_reduce(received, group=evens)
    results.append(received)
    dist.barrier()
    return results


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 1))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    model: nn.Module,
    wrapped: Callable[[Tensor], Tensor],
    optimizer: Any,
) -> list[Tensor]:
    for step in range(20):
        optimizer.zero_grad()
        wrapped(batch(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)


def by_ddp(rank: int, size: int, *, hook: bool = False, view: bool = False) -> list[Tensor]:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=view, bucket_cap_mb=0.001
    )
    if hook:
        wrapped.register_comm_hook(None, lockstep.shared_memory_hook)
    weights = trained(model, wrapped, momentum(model))
    if hook:
        lockstep.World.current().close()
    return weights


def by_fsdp(rank: int, size: int) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    trained(model, model, momentum(model))
    return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[operator]


def sparse(rank: int, size: int) -> list[Tensor]:
    local = torch.sparse_coo_tensor(
        torch.tensor([[rank, 2]]), torch.tensor([1.0, 10.0 * (rank + 1)]), (4,)
    )
    dist.all_reduce(local)
    assert local.to_dense().tolist() == [1.0, 1.0, 30.0, 0.0]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.tensor([rank, step, 3 + rank])).square().sum().backward()
        optimizer.step()
    assert model[0].weight.grad.is_sparse  # type: ignore[union-attr]
    return [parameter.detach().clone() for parameter in model.parameters()]


def uneven(rank: int, size: int) -> list[Tensor]:
    """Rank 1 has two batches more: rank 0 answers its collectives from another place in torch's
    wrapper.
    """
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    with wrapped.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            wrapped(batch(rank, step)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def adopted(rank: int, size: int) -> list[Tensor]:
    """By one world after the other."""
    means, group = [], dist.group.WORLD
    for _ in range(2):
        with lockstep.init() as world:
            means.append(torch.tensor(world.mean(float(rank), 1.0)))
            world.barrier()
        assert dist.group.WORLD is group
    assert means == [0.5, 0.5]
    return means


def compiled(rank: int, size: int) -> list[Tensor]:
    model = net()
    fast = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    weights = trained(model, fast, momentum(model))
    fast(batch(rank, 99)[:3])  # another shape: traced once more
    return weights


# -- what gloo does not ---------------------------------------------------------------------------


def averages(rank: int, size: int) -> list[list[float]]:
    """Also in a group of one, which has no shared memory."""
    alone = [dist.new_group([other]) for other in range(size)][rank]
    results = []
    for group in (None, alone):
        number = torch.tensor([3, -5, 7]) + rank  # sums over two ranks: 7, -9, 15
        dist.all_reduce(number, dist.ReduceOp.AVG, group=group)
        results.append(number.tolist())
    part = torch.zeros(1, dtype=torch.int32)
    dist.reduce_scatter_tensor(
        part, torch.tensor([-3, 5], dtype=torch.int32) * (rank + 1), dist.ReduceOp.AVG
    )
    results.append(part.tolist())
    several = [torch.tensor([1.0]) * rank, torch.tensor([3 + rank])]
    dist.all_reduce_coalesced(several[1:], dist.ReduceOp.AVG)
    results.append(several[1].tolist())
    with pytest.raises((UsageError, RuntimeError), match=r"bool|Bool"):
        dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)
    return results


def firsts(tensors: list[Tensor]) -> list[float]:
    return [tensor.flatten()[0].item() for tensor in tensors]


def coalesced(rank: int, size: int) -> list[Any]:
    alone = [dist.new_group([other]) for other in range(size)][rank]
    results: list[Any] = []
    for group, members in ((None, size), (alone, 1)):
        local = [torch.full((2,), float(rank)), torch.full((3, 1), 10.0 * rank)]
        gathered = [[torch.zeros(2), torch.zeros(3, 1)] for _ in range(members)]
        dist.all_gather_coalesced(gathered, local, group=group)
        results.append([firsts(tensors) for tensors in gathered])
        dist.all_reduce_coalesced(local, group=group)
        results.append(firsts(local))
        flags = [torch.tensor([rank + 2]), torch.tensor([7])]
        dist.all_reduce_coalesced(flags, dist.ReduceOp.BAND, group=group)
        results.append(firsts(flags))
    return results


def destroyed_one_by_one(rank: int, size: int) -> float:
    for _ in range(3):
        group = dist.new_group(list(range(size)))
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        dist.destroy_process_group(group)
    dist.all_reduce(value)
    return value.item()


def inferred(rank: int, size: int) -> list[list[float]]:
    """Tensors of inference mode, inside and outside of it, and ordinary ones inside."""
    ordinary = torch.tensor([float(rank)])
    with torch.inference_mode():
        local = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() + rank
        dist.all_reduce(local)
        dist.all_reduce(ordinary)
        pending = dist.all_reduce(torch.ones(1), async_op=True)
    assert pending is not None
    pending.wait()
    dist.all_reduce(local, dist.ReduceOp.AVG)
    dist.broadcast(local, 1)
    pieces = [torch.zeros_like(local) for _ in range(size)]
    dist.all_gather(pieces, local)
    ordinary.add_(1)  # not frozen by having been there
    return [local.flatten().tolist(), pieces[0].flatten().tolist(), ordinary.tolist()]


Cases = dict[str, Callable[[int, int], Any]]
CASES: dict[int, Cases] = {
    2: {
        "everything": everything,
        "fsdp": by_fsdp,
        "sparse": sparse,
        "join": uneven,
        "adopted by worlds": adopted,
    },
    3: {"everything": everything, "ddp": by_ddp, "views": partial(by_ddp, view=True)},
}
HOOKS: Cases = {
    "ddp": partial(by_ddp, hook=True),
    "views": partial(by_ddp, hook=True, view=True),
}
OURS: Cases = {
    "averages": averages,
    "coalesced": coalesced,
    "destroyed one by one": destroyed_one_by_one,
    "inference mode": inferred,
}
MORE: dict[tuple[str, int], Cases] = {
    ("lockstep", 2): OURS,
    ("gloo", 3): {f"{name}, hook": case for name, case in HOOKS.items()},
}


@cache
def results(backend: str, workers: int) -> list[dict[str, Any]]:
    """By rank and case: ranks start once for all cases of their number."""
    cases = CASES[workers] | MORE.get((backend, workers), {})
    return run_ranks(run_cases, workers, (backend, cases))


def compare(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str, more: str = ""
) -> None:
    for rank, expected in zip(ours, theirs, strict=True):
        for one, other in zip(rank[name + more], expected[name], strict=True):
            close = 0 if name == "everything" else 1e-6
            bound = 2e-2 if one.dtype == torch.bfloat16 else close
            torch.testing.assert_close(one, other, rtol=bound, atol=close)


@pytest.mark.parametrize(
    ("workers", "name"), [(workers, name) for workers, cases in CASES.items() for name in cases]
)
def test_a_program_of_torchs_gives_what_it_gives_over_gloo(workers: int, name: str) -> None:
    ours = results("lockstep", workers)
    compare(ours, results("gloo", workers), name)
    if name in HOOKS:
        assert all(map(torch.equal, ours[0][name], ours[-1][name]))


@pytest.mark.parametrize("name", HOOKS)
def test_the_hook_trains_as_over_gloo(name: str) -> None:
    ranks = results("gloo", 3)
    compare(ranks, ranks, name, ", hook")
    assert all(map(torch.equal, ranks[0][f"{name}, hook"], ranks[-1][f"{name}, hook"]))


@pytest.mark.rest
def test_a_compiled_wrapper_trains_as_over_gloo() -> None:
    ours, theirs = (
        run_ranks(run_cases, 2, (backend, {"compiled": compiled}))
        for backend in ("lockstep", "gloo")
    )
    compare(ours, theirs, "compiled")


def test_what_only_this_backend_does() -> None:
    """A mean of integers is cut towards zero: as NCCL's, and as Lightning's own division where it
    meets gloo, which refuses it.
    """
    first, second = ({name: rank[name] for name in OURS} for rank in results("lockstep", 2))
    both = [[[0.0, 0.0], [1.0, 10.0]], [1.0, 10.0], [2, 7]]
    same = {
        "destroyed one by one": 2.0,
        "inference mode": [[3.0, 7.0, 5.0, 9.0], [3.0, 7.0, 5.0, 9.0], [2.0]],
    }
    assert first == same | {
        "averages": [[3, -4, 7], [3, -5, 7], [-4], [3]],
        "coalesced": [*both, [[0.0, 0.0]], [0.0, 0.0], [2, 7]],
    }
    assert second == same | {
        "averages": [[3, -4, 7], [4, -4, 8], [7], [3]],
        "coalesced": [*both, [[1.0, 10.0]], [1.0, 10.0], [3, 7]],
    }


# -- what goes wrong -----------------------------------------------------------------------------


def fails(rank: int) -> str:
    """A monitored barrier without patience, different collectives, and a death."""
    import lockstep.backend

    lockstep.init(rank=rank, world_size=3, backend="gloo")
    patient: Any = dist.new_group([0, 1], backend="lockstep")
    everybody = dist.new_group(backend="lockstep")
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            patient.monitored_barrier(timedelta(0))
    if rank < 2:
        with refused("collective-mismatch", CollectiveMismatch) as caught:
            if rank == 0:
                dist.all_reduce(torch.ones(3), group=patient)
            else:
                dist.broadcast(torch.ones(3), 0, group=patient)
        assert re.match(
            r"rank 0 all_reduce sum f32\[3\] at .*; rank 1 broadcast from 0 f32\[3\]",
            caught.value.values["calls"],
        )
    dist.all_reduce(torch.ones(3), group=everybody)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with refused("peer-has-ended", PeerFailed, peer=1):
        dist.all_reduce(torch.ones(3), group=everybody)
    return "as expected"


def test_a_late_rank_different_collectives_and_a_dead_rank_are_errors() -> None:
    """No launcher here: it would end the others before they could say anything."""
    assert run_siblings(fails, 3)[0] == ["as expected", None, "as expected"]


def hooked_without_memory(world: lockstep.World) -> None:
    world.close()
    with lockstep.init(tags="off"):
        wrapped = nn.parallel.DistributedDataParallel(net())
        wrapped.register_comm_hook(None, lockstep.shared_memory_hook)
        with pytest.raises(
            (UsageError, RuntimeError),
            match="shared_memory_hook needs several ranks, all of them on the CPU of one x86 Linux host",
        ):
            wrapped(torch.randn(4, 20)).sum().backward()


def test_the_hook_says_what_it_needs() -> None:
    run_ranks(hooked_without_memory, 2)
