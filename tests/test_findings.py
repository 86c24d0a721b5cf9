"""Cases that a review found wrong once. Each failed before it was mended."""

from __future__ import annotations

import copy
import gc
import math
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import collectives
from lockstep.errors import CollectiveMismatch, LateGradient, LockstepWarning, UsageError
from lockstep.step.step_result import StepResult
from lockstep.testing import run_ranks
from tests import zoo
from tests.refused import refused


def batch(rank: int, number: int = 0) -> tuple[Tensor, Tensor]:
    x, y = zoo.samples(256)
    rows = slice(4 * (4 * number + rank), 4 * (4 * number + rank) + 4)
    return x[rows], y[rows]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def step(
    stepper: lockstep.Stepper, model: nn.Module, *batches: tuple[Tensor, Tensor]
) -> StepResult:
    for x, y in stepper.micro_batches(batches):
        stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
    return stepper.step()


class Buffers(nn.Module):
    """A mask of infinities, a counter that is large, a flag that falls, a complex one, a cache
    that grows, one that begins late.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        self.register_buffer("count", torch.tensor(2**30 + 1))
        self.register_buffer("fresh", torch.tensor(True))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("late", torch.zeros(()))
        self.calls = 0
        self.first = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.fresh.fill_(False)
        self.phase += 1j
        self.cache = torch.zeros(self.calls)
        if self.calls > 1 and self.first:
            self.late += 1
        return self.linear(x)


def moving(world: lockstep.World) -> dict[str, object]:
    model = Buffers()
    model.first = world.rank == 0
    stepper = lockstep.Stepper(model, sgd(model))
    seen = []
    for number in range(4):
        step(stepper, model, batch(world.rank, number))  # one micro-batch a rank
        seen.append(model.late.item())
    return {
        "mask": model.mask.tolist(),
        "count": model.count.item(),
        "fresh": model.fresh.item(),
        "phase": model.phase.tolist(),
        "late": seen,
    }


def test_buffers_of_every_kind_move_as_they_should() -> None:
    first, second = run_ranks(moving, 2)
    assert first == second
    assert first["mask"] == torch.full((3, 3), -math.inf).triu(1).tolist()
    assert first["count"] == 2**30 + 1 + 4
    assert first["fresh"] is False
    assert first["phase"] == [4j, 4j]
    assert first["late"] == [0.0, 1.0, 1.5, 2.0]  # found out in step 2, then the mean of both ranks


def hook_meets_stepper(world: lockstep.World) -> tuple[str, float]:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with ddp.join():
        zoo.loss_sum(ddp(batch(world.rank)[0]), batch(world.rank)[1]).backward()
    model.zero_grad()
    # join() did not leave its divisor behind
    zoo.loss_sum(ddp(batch(world.rank)[0]), batch(world.rank)[1]).backward()
    norm = float(model[0].weight.grad.norm())
    with refused("hook-with-stepper"):
        lockstep.Stepper(ddp, sgd(model))
    return "refused", norm


def test_a_hook_divides_once_also_after_join_and_never_under_a_stepper() -> None:
    model = zoo.build("mlp")
    for rank in range(2):
        x, y = batch(rank)
        (zoo.loss_sum(model(x), y) / 2).backward()
    assert [norm for _, norm in run_ranks(hook_meets_stepper, 2)] == pytest.approx(
        [float(model[0].weight.grad.norm())] * 2, rel=1e-5
    )


def stepper_in_a_group(world: lockstep.World) -> tuple[float, list[Tensor]]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model, process_group=pairs[world.rank // 2])
    stepper = lockstep.Stepper(ddp, sgd(model))
    result = step(stepper, ddp, batch(world.rank))
    return result.weight, [parameter.detach().clone() for parameter in model.parameters()]


def test_a_stepper_around_a_wrapper_of_some_ranks_stays_among_them() -> None:
    found = run_ranks(stepper_in_a_group, 4)
    for rank, (weight, weights) in enumerate(found):
        model = zoo.build("mlp")
        for other in (0, 1) if rank < 2 else (2, 3):
            x, y = batch(other)
            (zoo.loss_sum(model(x), y) / 8).backward()
        sgd(model).step()
        assert weight == 8
        for ours, theirs in zip(weights, model.parameters(), strict=True):
            assert zoo.distance(ours, theirs) < 1e-6


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.branch = nn.Linear(6, 3), nn.Linear(6, 3), "a"

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.branch)(x)  # type: ignore[no-any-return]


def accumulates_branches(world: lockstep.World) -> tuple[float, bool]:
    torch.manual_seed(0)
    model = Two()
    ddp = lockstep.DistributedDataParallel(model, find_unused_parameters=True)
    zoo.loss_sum(ddp(batch(world.rank)[0]), batch(world.rank)[1]).backward()
    kept = float(model.a.weight.grad.norm())
    model.branch = "b"
    zoo.loss_sum(ddp(batch(world.rank, 1)[0]), batch(world.rank, 1)[1]).backward()
    return kept, model.a.weight.grad is not None and math.isclose(
        float(model.a.weight.grad.norm()), kept, rel_tol=1e-6
    )


def test_skipping_unused_parameters_keeps_what_earlier_backwards_left() -> None:
    assert all(same for _, same in run_ranks(accumulates_branches, 2))


def only_under_no_sync(world: lockstep.World) -> float:
    torch.manual_seed(0)
    model = Two()
    ddp = lockstep.DistributedDataParallel(model)
    for number in range(3):  # buckets are laid anew at the second window's closing forward
        model.zero_grad()
        with ddp.no_sync():
            model.branch = "a"
            zoo.loss_sum(ddp(batch(world.rank, number)[0]), batch(world.rank, number)[1]).backward()
        model.branch = "b"
        zoo.loss_sum(ddp(batch(world.rank, number)[0]), batch(world.rank, number)[1]).backward()
    return float(model.a.weight.grad.norm())


def test_a_parameter_used_only_under_no_sync_is_used() -> None:
    first, second = run_ranks(only_under_no_sync, 2)
    assert first == second > 0


class Reused(nn.Module):
    """One block, used twice under reentrant checkpointing, before a layer that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(
            checkpoint(
                self.block,
                checkpoint(self.block, x.requires_grad_(), use_reentrant=True),
                use_reentrant=True,
            )
        )


def reentrant_twice(world: lockstep.World) -> str:
    torch.manual_seed(0)
    ddp = lockstep.DistributedDataParallel(Reused(), bucket_cap_mb=0.0001)
    x, y = batch(world.rank)
    try:
        zoo.loss_sum(ddp(x), y).backward()
    except LateGradient as error:
        world.close(failed=True)
        return str(error)
    return "nothing said"


def test_a_block_used_twice_under_reentrant_checkpointing_is_refused() -> None:
    for message in run_ranks(reentrant_twice, 2):
        assert "a block used twice under reentrant checkpointing" in message
        assert "static_graph=True" in message


def adopt_twice(rank: int, size: int, path: str) -> list[float]:
    found = []
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    for _ in range(2):
        with lockstep.init() as world:
            found.append(world.mean(float(rank), 1.0))
            world.barrier()
    dist.destroy_process_group()
    return found


def adopts(path: str) -> list[float]:
    return adopt_twice(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), path)


def test_a_group_can_be_adopted_again(tmp_path: object) -> None:
    assert lockstep.launch(adopts, 2, args=(f"{tmp_path}/store",)) == [[0.5, 0.5]] * 2


def idle_scaler(world: lockstep.World) -> tuple[list[bool], list[Tensor]]:
    model = zoo.build("mlp")
    stepper = lockstep.Stepper(
        model, sgd(model), scaler=torch.amp.GradScaler("cpu", init_scale=4.0)
    )
    results = [
        step(stepper, model, *([batch(0, number)] if world.rank == 0 else []))
        for number in range(2)
    ]
    return [result.applied for result in results], [
        parameter.detach().clone() for parameter in model.parameters()
    ]


def test_a_loss_scaler_on_a_rank_that_idles() -> None:
    first, second = run_ranks(idle_scaler, 2)
    assert first[0] == second[0] == [True, True]
    for a, b in zip(first[1], second[1], strict=True):
        assert torch.equal(a, b)


def far_ahead(world: lockstep.World) -> float:
    """Rank 0 runs hundreds of different broadcasts ahead: the page has long forgotten the first
    when rank 1 comes to it.
    """
    tensors = [torch.full((1 + number % 7,), float(number)) for number in range(600)]
    handles = [world.group.broadcast(tensor) for tensor in tensors]
    for handle in handles:
        handle.wait()
    return float(sum(tensor.sum() for tensor in tensors))


def test_a_rank_may_run_far_ahead_with_different_collectives() -> None:
    assert len(set(run_ranks(far_ahead, 3))) == 1


def barrier_against_collective(world: lockstep.World) -> str:
    try:
        if world.rank:
            collectives.all_reduce(torch.zeros(3))
        else:
            world.barrier()
    except CollectiveMismatch as error:
        world.close(failed=True)
        return str(error)
    return "nothing said"


def test_a_barrier_against_a_collective_is_found_on_both_sides() -> None:
    for message in run_ranks(barrier_against_collective, 2):
        assert message.startswith("#1: rank 0 barrier at test_findings.py:")


def rewrapped(world: lockstep.World) -> bool:
    model = zoo.build("mlp")
    gc.disable()
    try:
        for _ in range(2):
            ddp = lockstep.DistributedDataParallel(model)
            del ddp
        zoo.loss_sum(
            lockstep.DistributedDataParallel(model)(batch(world.rank)[0]), batch(world.rank)[1]
        ).backward()
    finally:
        gc.enable()
    rows = collectives.all_gather(model[0].weight.grad.reshape(1, -1))
    return torch.equal(rows[0], rows[1])


def test_a_model_can_be_wrapped_again_and_a_dropped_wrapper_still_reduces() -> None:
    assert run_ranks(rewrapped, 2) == [True, True]


def leaks(world: lockstep.World) -> int:
    world.close()
    open_files = []
    for _ in range(6):
        with lockstep.init() as inner:
            inner.barrier()
        gc.collect()
        open_files.append(len(os.listdir("/proc/self/fd")))
    return open_files[-1] - open_files[2]


def test_a_closed_world_leaves_no_file_open() -> None:
    assert max(run_ranks(leaks, 2)) <= 0


def after_an_exception(world: lockstep.World) -> float:
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    x, y = batch(world.rank)

    def boom(gradient: Tensor) -> None:
        raise KeyError("boom")

    handle = model[0].bias.register_hook(boom)
    with pytest.raises(KeyError):
        zoo.loss_sum(ddp(x), y).backward()
    handle.remove()
    model.zero_grad()
    zoo.loss_sum(ddp(x), y).backward()
    return float(model[0].weight.grad.norm())


def test_a_backward_that_raised_on_all_ranks_leaves_nothing_behind() -> None:
    model = zoo.build("mlp")
    for rank in range(2):
        x, y = batch(rank)
        (zoo.loss_sum(model(x), y) / 2).backward()
    assert run_ranks(after_an_exception, 2) == pytest.approx(
        [float(model[0].weight.grad.norm())] * 2, rel=1e-5
    )


def overlapping(world: lockstep.World) -> str:
    try:
        if world.rank == 0:
            world.subgroup([0, 1])
            world.subgroup([0, 2])
        else:
            world.subgroup([0, world.rank])
        said = "fine"
    except UsageError as error:
        said = str(error)
    world.close(failed=True)
    return said


def test_overlapping_subgroups_that_torch_cannot_name_are_refused() -> None:
    found = run_ranks(overlapping, 3)
    assert found[1] == "fine"
    assert "so torch would name it differently on each" in found[0]
    assert "so torch would name it differently on each" in found[2]


def test_a_fused_optimizer_under_float64() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with lockstep.init():
            model = zoo.build("mlp")
            stepper = lockstep.Stepper(
                model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
            )
            x, y = batch(0)
            assert step(stepper, model, (x.double(), y)).applied
    finally:
        torch.set_default_dtype(before)


def test_a_mean_over_nothing_with_a_tensor_weight() -> None:
    with lockstep.init():
        model = zoo.build("mlp")
        stepper = lockstep.Stepper(model, sgd(model))
        x, y = batch(0)
        for number, (u, v) in enumerate(stepper.micro_batches([(x, y), (x, y)])):
            target = v if number else torch.full_like(v, -100)
            stepper.backward(
                nn.functional.cross_entropy(model(u), target),
                weight=(target >= 0).sum(),
                reduction="mean",
            )
        assert math.isfinite(stepper.step().loss)


def test_a_graph_on_a_gradient_does_not_travel_and_this_is_said() -> None:
    with lockstep.init():
        model = zoo.build("mlp")
        ddp = lockstep.DistributedDataParallel(model)
        x, y = batch(0)
        loss = zoo.loss_sum(ddp(x), y)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss.backward(create_graph=True)
        assert any(issubclass(each.category, LockstepWarning) for each in said)
        assert not any(
            parameter.grad is None or parameter.grad.requires_grad
            for parameter in model.parameters()
        )


def cleared(world: lockstep.World, to_none: bool, where: str) -> str:
    model = zoo.build("mlp")
    optimizer = sgd(model)
    stepper = lockstep.Stepper(model, optimizer)
    try:
        for x, y in stepper.micro_batches(
            [batch(world.rank), batch(world.rank, 1)] if world.rank == 0 else []
        ):
            stepper.backward(zoo.loss_sum(model(x), y), weight=4)
            if where == "inside":
                optimizer.zero_grad(set_to_none=to_none)
        if where == "after":
            optimizer.zero_grad(set_to_none=to_none)
        if world.rank == 1:
            return "idle"
        stepper.step()
    except UsageError as error:
        return str(error)
    finally:
        world.close(failed=True)
    return "nothing said"


@pytest.mark.parametrize(
    ("to_none", "where"), [(True, "after"), (False, "after"), (True, "inside")]
)
def test_gradients_that_are_cleared_before_the_step_are_noticed(to_none: bool, where: str) -> None:
    message = run_ranks(cleared, 2, args=(to_none, where))[0]
    assert message.endswith("[gradient-cleared]")


def test_plain_backward_in_place_of_the_steppers_is_noticed() -> None:
    with lockstep.init():
        model = zoo.build("mlp")
        stepper = lockstep.Stepper(model, sgd(model))
        for x, y in stepper.micro_batches([batch(0), batch(0, 1)]):
            zoo.loss_sum(model(x), y).backward()
        with refused("backward-not-by-stepper"):
            stepper.step()


def test_a_loss_of_nan_updates_nothing_and_is_said_once() -> None:
    with lockstep.init():
        model = zoo.build("mlp")
        stepper = lockstep.Stepper(model, sgd(model))
        x, y = batch(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                for u, v in stepper.micro_batches([(x, y)]):
                    stepper.backward(zoo.loss_sum(model(u), v) * math.nan, weight=4)
                assert not stepper.step().applied
        assert [str(each.message) for each in said if each.category is LockstepWarning] == [
            (
                "step 1 was skipped: the loss is nan: this update would make every weight nan. The"
                " loss of rank 0 is not finite. The next window's gradients are checked one by"
                " one, before they are summed. This warning appears once."
            ),
            (
                "step 2 was skipped: the loss is nan: this update would make every weight nan. The"
                " loss of rank 0 is not finite. Before the sum, the first gradient that is not"
                " finite: '4.bias' on rank 0 (micro-batch 0 of its window). This warning appears"
                " once."
            ),
        ]
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_mistaken_arguments_are_sentences() -> None:
    with lockstep.init():
        model = zoo.build("mlp")
        with refused("not-a-model-and-optimizer", model="Sequential", optimizer="list"):
            lockstep.Stepper(model, [sgd(model), sgd(model)])  # type: ignore[arg-type]
        with refused("not-a-model-and-optimizer", model="SGD", optimizer="Sequential"):
            lockstep.Stepper(sgd(model), model)  # type: ignore[arg-type]
        torchs = nn.parallel.DistributedDataParallel(model)
        with refused("already-wrapped", module="the model"):
            lockstep.Stepper(torchs, sgd(model))
        with refused("already-wrapped", module="the module"):
            lockstep.DistributedDataParallel(torchs)
        stepper = lockstep.Stepper(model, sgd(model))
        with refused("not-a-window", kind="int"):
            next(stepper.micro_batches(5))  # type: ignore[arg-type]
        for _ in stepper.micro_batches([batch(0)]):
            with refused("loss-not-a-tensor", kind="float"):
                stepper.backward(1.0, weight=1)  # type: ignore[arg-type]
        with refused("loader-iterated"):
            iter(lockstep.Loader(torch.utils.data.TensorDataset(*zoo.samples(8)), global_batch=4))


def test_a_wrapper_can_be_copied_saved_and_averaged_and_a_copy_is_tied_to_the_ranks_when_it_is_trained(
    tmp_path: Path,
) -> None:
    with lockstep.init():
        ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
        x, y = batch(0)
        average = torch.optim.swa_utils.AveragedModel(ddp)
        average.update_parameters(ddp)
        torch.save(ddp, tmp_path / "ddp.pt")
        for other in (
            copy.deepcopy(ddp),
            torch.load(tmp_path / "ddp.pt", weights_only=False),
            average,
        ):
            other.eval()
            assert torch.equal(other(x), ddp(x))
            other.train()
            zoo.loss_sum(other(x), y).backward()
            assert all(parameter.grad is not None for parameter in other.parameters())
        zoo.loss_sum(ddp(x), y).backward()
        assert ddp.module[0].weight.grad is not None


def test_parameters_that_the_optimizer_does_not_hold_are_named() -> None:
    with lockstep.init():
        model = zoo.build("mlp")
        with pytest.warns(
            LockstepWarning,
            match=(
                r"the optimizer does not hold '2.weight', '2.bias', '4.weight', '4.bias': their"
                r" gradients"
            ),
        ):
            lockstep.Stepper(model, sgd(model[0]))  # type: ignore[index]
