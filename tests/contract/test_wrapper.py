"""The same script with torch's wrapper and with ours: gradients and weights are the same after
each of these uses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import (
    CollectiveMismatch,
    LateGradient,
    ReplicaDivergence,
    UnusedParameters,
    UsageError,
)
from lockstep.runtime.failure_record import readable_traceback
from tests import zoo
from tests.collectives.own_groups import group_of_its_own
from tests.refused import refused
from tests.teams import on_team

Make = Callable[..., Any]
Case = Callable[[Make, int], Iterator[Tensor | None]]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    x, y = zoo.batch(rank, number)
    optimizer.zero_grad()
    zoo.loss_sum(model(x), y).backward()
    optimizer.step()


def gradients(model: nn.Module) -> Iterator[Tensor | None]:
    for parameter in model.parameters():
        yield None if parameter.grad is None else parameter.grad.clone()


def joined_twice(make: Make, rank: int) -> Iterator[Tensor | None]:
    """Loops that clear gradients after the step find their own in the next epoch, not those of
    ranks that went on.
    """
    ddp = make(nn.Linear(1, 1, bias=False))
    for _ in range(2):
        with ddp.join():
            for _ in range(3 + 2 * rank):
                ddp(torch.ones(1, 1)).sum().backward()
                yield from gradients(ddp)
                ddp.zero_grad()
        yield from gradients(ddp)


def joined_with_buffers(make: Make, rank: int) -> Iterator[Tensor | None]:
    """Batches of unequal number, some of them without a sum. The last rank is the first to end."""
    ddp = make(zoo.build("cnn"))
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02)
    with ddp.join(divide_by_initial_world_size=False):
        for number in range(7 - 3 * rank):
            x, y = zoo.batch(rank, number)
            if number % 3:
                with ddp.no_sync():
                    zoo.loss_sum(ddp(x), y).backward()
            else:
                zoo.loss_sum(ddp(x), y).backward()
                sgd.step()
                sgd.zero_grad()
    step(ddp, sgd, rank, 9)  # join() does not leave its divisor behind
    yield from ddp.state_dict().values()


def joined_with_a_sharded_optimizer(make: Make, rank: int) -> Iterator[Tensor | None]:
    """A rank without inputs goes on updating its share of the weights (of several tensors, or of
    one): they are those of a plain optimizer under torch's wrapper.
    """
    for features in (3, 700):
        torch.manual_seed(3)
        ddp = make(nn.Linear(6, features))
        if make is lockstep.DistributedDataParallel:
            sgd: Any = lockstep.ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.02)
            joinables = [ddp, sgd]
        else:
            sgd, joinables = torch.optim.SGD(ddp.parameters(), lr=0.02), [ddp]
        with Join(joinables):
            for number in range(2 + 2 * rank):
                step(ddp, sgd, rank, number)
        yield from ddp.parameters()


def adversarial(make: Make, rank: int) -> Iterator[Tensor | None]:
    """pix2pix: the discriminator's parameters are frozen in the generator's step."""
    generator = make(zoo.mlp())
    discriminator = make(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    ours = torch.optim.SGD(generator.parameters(), lr=0.02)
    theirs = torch.optim.SGD(discriminator.parameters(), lr=0.02)
    for number in range(4):
        x, y = zoo.batch(rank, number)
        fake = generator(x)
        discriminator.requires_grad_(True)
        theirs.zero_grad()
        (
            discriminator(fake.detach()).sum()
            - discriminator(nn.functional.one_hot(y, 3).float()).sum()
        ).backward()
        theirs.step()
        discriminator.requires_grad_(False)
        ours.zero_grad()
        discriminator(fake).sum().backward()
        ours.step()
    yield from generator.parameters()
    yield from discriminator.parameters()


def copied(make: Make, rank: int) -> Iterator[Tensor | None]:
    """A copy of a wrapper is a wrapper."""
    ddp = make(zoo.build("mlp"))
    step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), rank, 0)
    again = copy.deepcopy(ddp)
    sgd = torch.optim.SGD(again.parameters(), lr=0.02)
    for number in range(3):
        step(again, sgd, rank, number)
    yield from again.parameters()
    yield from ddp.parameters()


class Rows(nn.Module):
    def __init__(self, more: bool) -> None:
        super().__init__()
        self.bag = nn.Embedding(50, 3, sparse=True)
        self.last = nn.Linear(3, 3) if more else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.bag((x.abs() * 20).long().clamp(max=49)).sum(1))
        return found


def sparse(make: Make, rank: int, more: bool = True) -> Iterator[Tensor | None]:
    """Gradients of sparse embeddings are sparse, which SparseAdam needs; also when several
    backwards add up, and when one rank's batch has no row.
    """
    ddp = make(Rows(more))
    rows = torch.optim.SparseAdam([ddp.module.bag.weight], lr=0.02)
    others = list(ddp.module.last.parameters())
    for number in range(4):
        x, y = zoo.batch(rank, number)
        x = x[:, : 0 if rank == number == 1 else None]
        if number % 2:
            with ddp.no_sync():
                zoo.loss_sum(ddp(x), y).backward()
        zoo.loss_sum(ddp(x), y).backward()
        assert ddp.module.bag.weight.grad.is_sparse
        yield ddp.module.bag.weight.grad.to_dense()
        rows.step()
        for parameter in others:
            parameter.data -= 0.02 * parameter.grad
        ddp.zero_grad()
    yield from ddp.parameters()


def batch_norm(make: Make, rank: int) -> Iterator[Tensor | None]:
    """Every forward begins with rank 0's buffers, the first one of an evaluation too."""
    ddp = make(zoo.build("cnn"))
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for number in range(3):
        step(ddp, sgd, rank, number)
        yield from ddp.buffers()
    ddp.eval()
    with torch.no_grad():
        yield ddp(zoo.batch(0, 7)[0])
    yield from ddp.buffers()


def thawed(make: Make, rank: int) -> Iterator[Tensor | None]:
    """Parameters that are frozen for a step, and not in the next one."""
    ddp = make(zoo.build("mlp"), find_unused_parameters=True)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for number in range(4):
        ddp.module[0].requires_grad_(number % 2 == 0)
        step(ddp, sgd, rank, number)
        yield from gradients(ddp)
    yield from ddp.parameters()


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing, one of them used twice with `twice`; two share a
    weight with `shared`.
    """

    def __init__(self, *, reentrant: bool, twice: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.reentrant, self.uses = reentrant, 2 if twice else 1
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.block, self.other = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        if shared:
            self.other[0].weight = self.block[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*[self.block] * self.uses, self.other):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        result: Tensor = self.last(x)
        return result


def checkpointed(
    make: Make, rank: int, static: bool = True, **options: bool
) -> Iterator[Tensor | None]:
    ddp = make(Checkpointed(**options), static_graph=static, bucket_cap_mb=0.0001)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for number in range(3):
        step(ddp, sgd, rank, number)
        yield from gradients(ddp)
    yield from ddp.parameters()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.neither = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        found: Tensor = self.left(x) if left else self.right(x)
        return found


def unused(make: Make, rank: int) -> Iterator[Tensor | None]:
    """`.grad` of what no rank uses stays None; what some rank uses is averaged on all."""
    ddp = make(Branches(), find_unused_parameters=True)
    for number in range(2):
        x, y = zoo.batch(rank, number)
        zoo.loss_sum(ddp(x, rank == number), y).backward()
        yield from gradients(ddp)
    ddp.zero_grad()
    x, y = zoo.batch(rank, 2)
    for left in (True, False):  # what the second does not use keeps what the first has left
        zoo.loss_sum(ddp(x, left), y).backward()
        yield from gradients(ddp)


def joined_with_unused_parameters(make: Make, rank: int) -> Iterator[Tensor | None]:
    """Batches of unequal number, with parameters that one rank does not use, and a hook."""
    ddp = make(Branches(), find_unused_parameters=True)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02)
    with ddp.join():
        for number in range(2 + 3 * rank):
            x, y = zoo.batch(rank, number)
            sgd.zero_grad()
            zoo.loss_sum(ddp(x, number % 2 == rank), y).backward()
            sgd.step()
    yield from ddp.parameters()
    x, y = zoo.batch(rank, 9)
    sgd.zero_grad()
    zoo.loss_sum(ddp(x, True), y).backward()
    yield from gradients(ddp)


CASES: dict[str, Case] = {
    "unused, joined": joined_with_unused_parameters,
    "joined twice": joined_twice,
    "buffers, joined": joined_with_buffers,
    "a sharded optimizer, joined": joined_with_a_sharded_optimizer,
    "adversarial": adversarial,
    "copied": copied,
    "sparse": sparse,
    "only sparse": partial(sparse, more=False),
    "batch norm": batch_norm,
    "thawed": thawed,
    "checkpointed": partial(checkpointed, static=False, reentrant=False),
    "reentrant": partial(checkpointed, static=False, reentrant=True),
    "reentrant twice": partial(checkpointed, reentrant=True, twice=True),
    "reentrant, sharing": partial(checkpointed, reentrant=True, twice=True, shared=True),
    "unused": unused,
}


def compared(world: lockstep.World, name: str) -> int:
    case = CASES[name]
    torch.manual_seed(3)
    theirs = list(map(cloned, case(nn.parallel.DistributedDataParallel, world.rank)))
    torch.manual_seed(3)
    ours = list(map(cloned, case(lockstep.DistributedDataParallel, world.rank)))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    return len(ours)


def cloned(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().clone()


@pytest.mark.parametrize("name", CASES)
def test_torchs_wrapper_and_ours_agree(name: str) -> None:
    assert min(on_team(compared, 2, (name,))) > 0


def doubled(world: lockstep.World) -> list[Tensor]:
    """The model becomes float64 after it was wrapped."""
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    ddp.double()
    x, y = zoo.batch(world.rank, 0)
    zoo.loss_sum(ddp(x.double()), y).backward()
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


def both_forwards_first(world: lockstep.World) -> list[Tensor]:
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    losses = [
        zoo.loss_sum(ddp(x), y) for x, y in (zoo.batch(world.rank, 0), zoo.batch(world.rank, 1))
    ]
    for loss in losses:
        loss.backward()
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("use", "dtype", "batches"),
    [(doubled, torch.float64, 1), (both_forwards_first, torch.float32, 2)],
)
def test_the_mean_where_torchs_wrapper_does_not_have_it(
    use: Callable[..., list[Tensor]], dtype: torch.dtype, batches: int
) -> None:
    plain = zoo.build("mlp").to(dtype)
    for rank, number in product(range(2), range(batches)):
        x, y = zoo.batch(rank, number)
        (zoo.loss_sum(plain(x.to(dtype)), y) / 2).backward()
    for averaged in on_team(use, 2):
        for ours, parameter in zip(averaged, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-5, atol=1e-6)


def only_under_no_sync(world: lockstep.World) -> Tensor:
    torch.manual_seed(0)
    ddp = lockstep.DistributedDataParallel(Branches())
    for number in range(3):  # buckets are laid anew at the second window's closing forward
        ddp.zero_grad()
        for left in (True, False):
            x, y = zoo.batch(world.rank, number)
            with ddp.no_sync() if left else nullcontext():
                zoo.loss_sum(ddp(x, left) + 0 * ddp.module.neither(x), y).backward()
    return ddp.module.left.weight.grad


def test_a_parameter_used_only_under_no_sync_is_used() -> None:
    first, second = on_team(only_under_no_sync, 2)
    assert torch.equal(first, second)
    assert first.any()


def attributes(world: lockstep.World) -> tuple[Tensor, Tensor]:
    ddp = lockstep.DistributedDataParallel(
        zoo.build("mlp"),
        bucket_cap_mb_list=[0.0001, 0.001],
        check_reduction=True,
        batched_grad_copy=True,
    )
    assert ddp.process_group is ddp.join_process_group is dist.group.WORLD
    assert ddp.require_backward_grad_sync is ddp.forward_sync_buffers is True
    assert ddp.device_mesh is None
    ddp.require_backward_grad_sync = False
    x, y = zoo.batch(world.rank, 0)
    zoo.loss_sum(ddp(x), y).backward()
    own = ddp.module[0].weight.grad.clone()
    ddp.require_backward_grad_sync = True
    zoo.loss_sum(ddp(x), y).backward()
    return own, ddp.module[0].weight.grad.clone()


def test_names_that_libraries_read() -> None:
    (first, mean), (second, same) = on_team(attributes, 2)
    assert not torch.equal(first, second)
    torch.testing.assert_close(mean, first + second)
    assert torch.equal(mean, same)


def no_future(state: object, bucket: Any) -> Any:
    return bucket.buffer()


def wrong_annotation(state: object, bucket: int) -> torch.futures.Future[Tensor]:
    raise AssertionError


def too_short(state: object, bucket: Any) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer()[:3])
    return future


def test_communication_hooks_are_checked() -> None:
    with lockstep.init():
        x, y = zoo.batch(0, 0)
        ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
        with pytest.raises(TypeError, match="must be callable"):
            ddp.register_comm_hook(None, {})  # type: ignore[arg-type]
        wrong_annotation.__annotations__["bucket"] = int
        with pytest.raises(ValueError, match="bucket annotation"):
            ddp.register_comm_hook(None, wrong_annotation)
        for hook, words in ((no_future, "but got Tensor"), (too_short, "a tensor of 3")):
            ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
            ddp.register_comm_hook(None, hook)
            with pytest.raises(UsageError, match=words):
                zoo.loss_sum(ddp(x), y).backward()


def diverged(world: lockstep.World, mode: str) -> None:
    """In evaluation, as a fine-tuning; or only the wrapper is, as in Lightning after a
    validation.
    """
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    ddp.train(mode == "training")
    if mode == "wrapper in evaluation":
        ddp.module.train()
    with torch.no_grad():
        ddp.module[0].weight += world.rank
    for number in range(4):
        x, y = zoo.batch(world.rank, number)
        zoo.loss_sum(ddp(x), y).backward()


def without_gradients(world: lockstep.World, mode: str) -> None:
    ddp = lockstep.DistributedDataParallel(Branches())
    x, y = zoo.batch(world.rank, 0)
    zoo.loss_sum(ddp(x, True), y).backward()


def mismatched(world: lockstep.World, mode: str) -> None:
    with group_of_its_own(world) as group:
        ddp = lockstep.DistributedDataParallel(zoo.build("mlp"), process_group=group.process_group)
        x, y = zoo.batch(world.rank, 0)
        if world.rank:
            group.all_gather(torch.ones(3), place="of rank 1 alone")
        zoo.loss_sum(ddp(x), y).backward()


def raised(world: lockstep.World) -> None:
    """A launcher shows what the wrapper raises on purpose without frames of Lockstep."""
    for use, mode, error in (
        (diverged, "training", ReplicaDivergence),
        (diverged, "evaluation", ReplicaDivergence),
        (diverged, "wrapper in evaluation", ReplicaDivergence),
        (without_gradients, "", UnusedParameters),
        (mismatched, "", CollectiveMismatch),
    ):
        with pytest.raises(error) as caught:
            use(world, mode)
        text = readable_traceback(caught.value)
        assert __file__ in text
        assert str(Path(lockstep.__file__).parent) not in text


def test_what_the_wrapper_raises_on_purpose_has_no_frames_of_lockstep() -> None:
    on_team(raised, 2)


def test_what_needs_a_static_graph_and_what_one_does_not_have_is_named() -> None:
    x, y = zoo.batch(0)
    with lockstep.init():
        twice = Checkpointed(reentrant=True, twice=True)
        ddp = lockstep.DistributedDataParallel(twice, bucket_cap_mb=0.0001)
        with pytest.raises(LateGradient, match="used twice under reentrant checkpointing"):
            zoo.loss_sum(ddp(x), y).backward()
        ddp = lockstep.DistributedDataParallel(Branches(), static_graph=True)
        zoo.loss_sum(ddp(x, True), y).backward()
        with pytest.raises(LateGradient, match="'right"):
            zoo.loss_sum(ddp(x, False), y).backward()
        with refused("static-graph-too-late"):
            ddp._set_static_graph()


def test_the_older_name_of_forward_sync_buffers_is_taken_with_a_warning() -> None:
    with lockstep.init():
        with pytest.warns(FutureWarning, match="broadcast_buffers=False is deprecated"):
            ddp = lockstep.DistributedDataParallel(zoo.build("cnn"), broadcast_buffers=False)
        assert not ddp.forward_sync_buffers
        with pytest.warns(FutureWarning, match="its value is ignored"):
            ddp = lockstep.DistributedDataParallel(
                zoo.build("cnn"), broadcast_buffers=False, forward_sync_buffers=True
            )
        assert ddp.forward_sync_buffers


@pytest.mark.filterwarnings("ignore:You are using a Backend")  # torch.distributed.rpc
def test_a_distributed_autograd_context_is_refused(tmp_path: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path / 'store'}")
    x, _ = zoo.batch(0, 0)
    with lockstep.init():
        ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        try:
            with dist.autograd.context(), refused("distributed-autograd"):
                ddp(x)
        finally:
            rpc.shutdown()
