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
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.errors import CollectiveMismatch, PeerFailed, UsageError, WorkerFailed
from lockstep.testing import run_ranks
from tests.refused import refused


def opened(world: lockstep.World, backend: str) -> tuple[int, int]:
    """A process group of torch's own, in the place of run_ranks' world."""
    world.close()
    if backend == "lockstep":
        import lockstep.backend  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size()


def everything(world: lockstep.World, backend: str) -> list[Tensor]:
    """Every collective of torch.distributed, different data on each rank."""
    rank, size = opened(world, backend)
    warnings.simplefilter("ignore", FutureWarning)
    noise = torch.randint(
        -9, 9, (3, 2 * size), generator=torch.Generator().manual_seed(rank)
    ).float()
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            mine = noise.to(dtype)
            dist.all_reduce(mine, op)
            found.append(mine)
    flags = torch.tensor([rank, 3])
    dist.all_reduce(flags, dist.ReduceOp.BOR)  # only gloo can
    found.append(flags)
    turned = noise.clone().t()
    dist.broadcast(turned, size - 1)
    found.append(turned.contiguous())
    several = [torch.zeros_like(noise) for _ in range(size)]
    dist.all_gather(several, noise)
    found += several
    whole = torch.zeros(3 * size, 2 * size)
    dist.all_gather_into_tensor(whole, noise)
    found.append(whole)
    part = torch.zeros(2, 3)
    dist.reduce_scatter_tensor(part, noise.t().contiguous())
    found.append(part)
    dist.reduce_scatter(part, list(noise.t().contiguous().view(size, 2, 3)))
    found.append(part.clone())
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, torch.arange(float(size)) + 10 * rank)
    found.append(exchanged)
    dist.reduce(noise, 0)
    if rank == 0:
        found.append(noise)
    pieces = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.tensor([float(rank)]), pieces)
    found += pieces or []
    got = torch.zeros(1)
    dist.scatter(
        got, [torch.tensor([float(other)]) for other in range(size)] if rank == 0 else None
    )
    found.append(got)
    names: list[Any] = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    assert names == [f"rank {other}" for other in range(size)]
    work = dist.all_reduce(got, async_op=True)
    assert work is not None
    work.wait()
    found.append(got)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    elif rank == 1:
        dist.recv(got, 0)
    evens = dist.new_group(list(range(0, size, 2)))
    if rank % 2 == 0:
        dist.all_reduce(got, group=evens)
    found.append(got)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_every_collective_gives_what_gloo_gives(workers: int) -> None:
    expected, found = (
        run_ranks(everything, workers, args=(backend,)) for backend in ("gloo", "lockstep")
    )
    for theirs, ours in zip(expected, found, strict=True):
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(
                other, one, rtol=2e-2 if one.dtype == torch.bfloat16 else 0, atol=0
            )


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 1))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    model: nn.Module,
    wrapped: Callable[[Tensor], Tensor],
    optimizer: Any,
    backward: Callable[[Tensor], Any] | None = None,
) -> list[Tensor]:
    for step in range(20):
        optimizer.zero_grad()
        loss = wrapped(batch(dist.get_rank(), step)).square().mean()
        if backward is None:
            loss.backward()
        else:
            backward(loss)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_ddp(world: lockstep.World, backend: str, hook: bool, view: bool) -> list[Tensor]:
    opened(world, backend)
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=view, bucket_cap_mb=0.001
    )
    if hook:
        wrapped.register_comm_hook(None, lockstep.shared_memory_hook)
    weights = trained(model, wrapped, torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9))
    if hook:
        lockstep.World.current().close()
    del wrapped
    # torch 2.13: a wrapper that is the last to hold gloo's group waits, with the GIL, for a thread
    # that wants the GIL
    gc.collect()
    dist.destroy_process_group()
    return weights


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(("backend", "hook"), [("lockstep", False), ("gloo", True)])
def test_torchs_wrapper_trains_as_over_gloo(backend: str, hook: bool, view: bool) -> None:
    expected = run_ranks(by_ddp, 3, args=("gloo", False, view))
    found = run_ranks(by_ddp, 3, args=(backend, hook, view))
    for weights in found:
        assert all(map(torch.equal, weights, found[0]))
        torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=1e-6)


def by_fsdp(world: lockstep.World, backend: str) -> list[Tensor]:
    opened(world, backend)
    warnings.simplefilter("ignore", FutureWarning)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained(model, model, torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9))
    weights = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]  # type: ignore[operator]
    dist.destroy_process_group()
    return weights


def test_fsdp_trains_as_over_gloo() -> None:
    expected, found = (run_ranks(by_fsdp, 2, args=(backend,)) for backend in ("gloo", "lockstep"))
    for weights in found:
        torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=1e-6)


def by_accelerate(world: lockstep.World, backend: str) -> list[Tensor]:
    opened(world, backend)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert (accelerator.num_processes, dist.get_backend()) == (2, backend)
    model = net()
    wrapped, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    )
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    weights = trained(model, wrapped, optimizer, accelerator.backward)
    del wrapped, optimizer
    accelerator.free_memory()  # as above: the wrapper goes before the process group
    gc.collect()
    accelerator.end_training()
    return weights


def test_accelerate_trains_as_over_gloo() -> None:
    pytest.importorskip("accelerate")
    expected, found = (
        run_ranks(by_accelerate, 2, args=(backend,)) for backend in ("gloo", "lockstep")
    )
    for weights in found:
        torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=1e-6)


def different(world: lockstep.World) -> None:
    rank, _ = opened(world, "lockstep")
    ours = (
        partial(dist.all_reduce, torch.ones(3))
        if rank == 0
        else partial(dist.broadcast, torch.ones(3), 0)
    )
    with refused("collective-mismatch", CollectiveMismatch) as caught:
        ours()
    assert re.match(
        r"rank 0 all_reduce sum f32\[3\] at .*; rank 1 broadcast from 0 f32\[3\]",
        caught.value.values["calls"],
    )


def test_different_collectives_are_a_mismatch() -> None:
    run_ranks(different, 2)


def killed(world: lockstep.World) -> None:
    rank, _ = opened(world, "lockstep")
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with refused("peer-has-ended", PeerFailed, peer=1):
        dist.all_reduce(torch.ones(3))


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 .*SIGKILL"):
        run_ranks(killed, 3)


def adopted(world: lockstep.World) -> float:
    rank, _ = opened(world, "lockstep")
    with lockstep.init() as adopting:
        value = adopting.mean(float(rank), 1.0)
    dist.destroy_process_group()
    return value


def test_a_world_adopts_it() -> None:
    assert run_ranks(adopted, 2) == [0.5, 0.5]


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


def averages(world: lockstep.World) -> list[list[float]]:
    """Also in a group of one, which has no shared memory."""
    rank, size = opened(world, "lockstep")
    alone = [dist.new_group([other]) for other in range(size)][rank]
    found = []
    for group in (None, alone):
        number = torch.tensor([3, -5, 7]) + rank  # sums over two ranks: 7, -9, 15
        dist.all_reduce(number, dist.ReduceOp.AVG, group=group)
        found.append(number.tolist())
    part = torch.zeros(1, dtype=torch.int32)
    dist.reduce_scatter_tensor(
        part, torch.tensor([-3, 5], dtype=torch.int32) * (rank + 1), dist.ReduceOp.AVG
    )
    found.append(part.tolist())
    several = [torch.tensor([1.0]) * rank, torch.tensor([3 + rank])]
    dist.all_reduce_coalesced(several[1:], dist.ReduceOp.AVG)
    found.append(several[1].tolist())
    with pytest.raises((UsageError, RuntimeError), match=r"bool|Bool"):
        dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)
    dist.destroy_process_group()
    return found


def test_a_mean_of_integers_is_cut_towards_zero() -> None:
    """As NCCL's, and as Lightning's own division where it meets gloo, which refuses it."""
    first, second = run_ranks(averages, 2)
    assert first == [[3, -4, 7], [3, -5, 7], [-4], [3]]
    assert second == [[3, -4, 7], [4, -4, 8], [7], [3]]


def coalesced(world: lockstep.World) -> list[Any]:
    rank, size = opened(world, "lockstep")
    warnings.simplefilter("ignore", FutureWarning)
    alone = [dist.new_group([other]) for other in range(size)][rank]
    found: list[Any] = []
    for group in (None, alone):
        members = 1 if group is not None else size
        mine = [torch.full((2,), float(rank)), torch.full((3, 1), 10.0 * rank)]
        gathered = [[torch.zeros(2), torch.zeros(3, 1)] for _ in range(members)]
        dist.all_gather_coalesced(gathered, mine, group=group)
        found.append([[each.flatten()[0].item() for each in theirs] for theirs in gathered])
        dist.all_reduce_coalesced(mine, group=group)
        found.append([each.flatten()[0].item() for each in mine])
        flags = [torch.tensor([rank + 2]), torch.tensor([7])]
        dist.all_reduce_coalesced(flags, dist.ReduceOp.BAND, group=group)
        found.append([each.item() for each in flags])
    dist.destroy_process_group()
    return found


def test_coalesced_collectives() -> None:
    both = [[[0.0, 0.0], [1.0, 10.0]], [1.0, 10.0], [2, 7]]
    assert run_ranks(coalesced, 2) == [
        [*both, [[0.0, 0.0]], [0.0, 0.0], [2, 7]],
        [*both, [[1.0, 10.0]], [1.0, 10.0], [3, 7]],
    ]


def sparse(world: lockstep.World, backend: str) -> list[Tensor]:
    rank, _ = opened(world, backend)
    mine = torch.sparse_coo_tensor(
        torch.tensor([[rank, 2]]), torch.tensor([1.0, 10.0 * (rank + 1)]), (4,)
    )
    dist.all_reduce(mine)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.tensor([rank, step, 3 + rank])).square().sum().backward()
        optimizer.step()
    assert model[0].weight.grad.is_sparse  # type: ignore[union-attr]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    del wrapped
    gc.collect()
    dist.destroy_process_group()
    return [mine.to_dense(), *weights]


def test_sparse_gradients_as_over_gloo() -> None:
    expected, found = (run_ranks(sparse, 2, args=(backend,)) for backend in ("gloo", "lockstep"))
    assert found[0][0].tolist() == [1.0, 1.0, 30.0, 0.0]
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def uneven(world: lockstep.World, backend: str) -> list[Tensor]:
    """Rank 1 has two batches more: rank 0 answers its collectives from another place in torch's
    wrapper.
    """
    rank, _ = opened(world, backend)
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    with wrapped.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            wrapped(batch(rank, step)).square().mean().backward()
            optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    del wrapped
    gc.collect()
    dist.destroy_process_group()
    return weights


def test_torchs_join_over_uneven_batches_as_over_gloo() -> None:
    expected, found = (run_ranks(uneven, 2, args=(backend,)) for backend in ("gloo", "lockstep"))
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def compiled(world: lockstep.World, backend: str) -> list[Tensor]:
    rank, _ = opened(world, backend)
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    fast = torch.compile(wrapped, backend="eager")
    weights = trained(model, fast, torch.optim.SGD(model.parameters(), lr=0.003))
    fast(batch(rank, 99)[:3])  # another shape: traced once more
    del wrapped, fast
    gc.collect()
    dist.destroy_process_group()
    return weights


def test_torchs_compiled_wrapper_trains_as_over_gloo() -> None:
    expected, found = (run_ranks(compiled, 2, args=(backend,)) for backend in ("gloo", "lockstep"))
    for theirs, ours in zip(expected, found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def destroyed_one_by_one(world: lockstep.World) -> float:
    rank, size = opened(world, "lockstep")
    for _ in range(3):
        group = dist.new_group(list(range(size)))
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        dist.destroy_process_group(group)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item()


def test_subgroups_are_destroyed_one_by_one() -> None:
    assert run_ranks(destroyed_one_by_one, 2) == [2.0, 2.0]


def inferred(world: lockstep.World) -> list[list[float]]:
    """Tensors of inference mode, inside and outside of it, and ordinary ones inside."""
    rank, size = opened(world, "lockstep")
    ordinary = torch.tensor([float(rank)])
    with torch.inference_mode():
        mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t() + rank
        dist.all_reduce(mine)
        dist.all_reduce(ordinary)
        pending = dist.all_reduce(torch.ones(1), async_op=True)
    assert pending is not None
    pending.wait()
    dist.all_reduce(mine, dist.ReduceOp.AVG)
    dist.broadcast(mine, 1)
    pieces = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(pieces, mine)
    ordinary.add_(1)  # not frozen by having been there
    dist.destroy_process_group()
    return [mine.flatten().tolist(), pieces[0].flatten().tolist(), ordinary.tolist()]


def test_tensors_of_inference_mode() -> None:
    assert run_ranks(inferred, 2) == [[[3.0, 7.0, 5.0, 9.0], [3.0, 7.0, 5.0, 9.0], [2.0]]] * 2


def gives_up_at_once(world: lockstep.World) -> None:
    rank, _ = opened(world, "lockstep")
    group: Any = dist.group.WORLD
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            group.monitored_barrier(timedelta(0))


def test_a_monitored_barrier_without_patience() -> None:
    run_ranks(gives_up_at_once, 2)
