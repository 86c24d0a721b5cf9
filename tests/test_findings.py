"""Cases that a review found wrong once. Each failed before it was mended."""

from __future__ import annotations

import copy
import gc
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from lockstep import collectives
from lockstep.errors import CollectiveMismatch, LockstepWarning, UsageError
from lockstep.testing import run_ranks
from tests import zoo
from tests.refused import refused
from tests.step.walking import walk
from tests.teams import on_team


@pytest.fixture
def world() -> Iterator[lockstep.World]:
    with lockstep.init() as world:
        yield world


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def backward(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        zoo.loss_sum(model(x), y).backward()


def mean_norm() -> float:
    """Of the first weight's gradient: the mean over two ranks, in one process."""
    model = zoo.build("mlp")
    backward(model, (zoo.batch(0), zoo.batch(1)))
    return float(model[0].weight.grad.norm()) / 2  # type: ignore[index]


BUFFERS = {
    "mask": torch.full((3, 3), -math.inf).triu(1),
    "count": torch.tensor(2**30 + 1),
    "fresh": torch.tensor(True),
    "phase": torch.zeros(2, dtype=torch.complex64),
}


class Buffers(nn.Module):
    """A mask of infinities, a counter that is large, a flag that falls, a complex one, a cache
    that grows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        for name, value in BUFFERS.items():
            self.register_buffer(name, value.clone())
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.fresh.fill_(False)
        self.phase += 1j
        self.cache = torch.zeros(len(self.cache) + 1)
        return self.linear(x)


def moving(world: lockstep.World) -> dict[str, object]:
    model = Buffers()
    stepper = lockstep.Stepper(model, sgd(model))
    for number in range(4):
        walk(stepper, [zoo.batch(world.rank, number)])  # one micro-batch a rank
    return {name: getattr(model, name).tolist() for name in BUFFERS}


def test_buffers_of_every_kind_move_as_they_should() -> None:
    moved = {"count": 2**30 + 1 + 4, "fresh": False, "phase": [4j, 4j]}
    expected = {"mask": BUFFERS["mask"].tolist(), **moved}
    assert on_team(moving, 2) == [expected, expected]


def rewrapped(world: lockstep.World) -> bool:
    model = zoo.build("mlp")
    gc.disable()
    try:
        for _ in range(2):
            ddp = lockstep.DistributedDataParallel(model)
            del ddp
        backward(lockstep.DistributedDataParallel(model), [zoo.batch(world.rank)])
    finally:
        gc.enable()
    rows = collectives.all_gather(model[0].weight.grad.reshape(1, -1))
    return torch.equal(rows[0], rows[1])


def test_a_model_can_be_wrapped_again_and_a_dropped_wrapper_still_reduces() -> None:
    assert on_team(rewrapped, 2) == [True, True]


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

    def boom(gradient: Tensor) -> None:
        raise KeyError("boom")

    handle = model[0].bias.register_hook(boom)
    with pytest.raises(KeyError):
        backward(ddp, [zoo.batch(world.rank)])
    handle.remove()
    model.zero_grad()
    backward(ddp, [zoo.batch(world.rank)])
    return float(model[0].weight.grad.norm())


def test_a_backward_that_raised_on_all_ranks_leaves_nothing_behind() -> None:
    assert on_team(after_an_exception, 2) == pytest.approx([mean_norm()] * 2, rel=1e-5)


def barrier_against_collective(world: lockstep.World) -> None:
    with refused("collective-mismatch", CollectiveMismatch, number=1):
        if world.rank:
            collectives.all_reduce(torch.zeros(3))
        else:
            world.barrier()
    world.close(failed=True)


def test_a_barrier_against_a_collective_is_found_on_both_sides() -> None:
    run_ranks(barrier_against_collective, 2)


def overlapping(world: lockstep.World) -> str:
    try:
        if world.rank == 0:
            world.subgroup([0, 1])
            world.subgroup([0, 2])
        else:
            world.subgroup([0, world.rank])
        code = ""
    except UsageError as error:
        code = error.code
    world.close(failed=True)
    return code


def test_overlapping_subgroups_that_torch_cannot_name_are_refused() -> None:
    code = "subgroups-out-of-step"
    assert run_ranks(overlapping, 3) == [code, "", code]


def test_a_fused_optimizer_under_float64(world: lockstep.World) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = zoo.build("mlp")
        stepper = lockstep.Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
        x, y = zoo.batch(0)
        assert walk(stepper, [(x.double(), y)]).applied
    finally:
        torch.set_default_dtype(before)


def test_a_graph_on_a_gradient_does_not_travel_and_this_is_said(world: lockstep.World) -> None:
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    x, y = zoo.batch(0)
    loss = zoo.loss_sum(ddp(x), y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss.backward(create_graph=True)
    assert any(issubclass(warning.category, LockstepWarning) for warning in caught)
    gradients = [parameter.grad for parameter in ddp.parameters()]
    assert not any(gradient is None or gradient.requires_grad for gradient in gradients)


def test_mistaken_arguments_are_sentences(world: lockstep.World) -> None:
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
    hooked = lockstep.DistributedDataParallel(model)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    with refused("hook-with-stepper"):
        lockstep.Stepper(hooked, sgd(model))
    stepper = lockstep.Stepper(model, sgd(model))
    with refused("not-a-window", kind="int"):
        next(stepper.micro_batches(5))  # type: ignore[arg-type]
    for _ in stepper.micro_batches([zoo.batch(0)]):
        with refused("loss-not-a-tensor", kind="float"):
            stepper.backward(1.0, weight=1)  # type: ignore[arg-type]
    with refused("loader-iterated"):
        iter(lockstep.Loader(torch.utils.data.TensorDataset(*zoo.samples(8)), global_batch=4))


def test_a_wrapper_can_be_copied_saved_and_averaged_and_a_copy_is_tied_to_the_ranks_when_it_is_trained(
    world: lockstep.World, tmp_path: Path
) -> None:
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    average = torch.optim.swa_utils.AveragedModel(ddp)
    average.update_parameters(ddp)
    torch.save(ddp, tmp_path / "ddp.pt")
    loaded = torch.load(tmp_path / "ddp.pt", weights_only=False)
    x, _ = zoo.batch(0)
    for other in (copy.deepcopy(ddp), loaded, average):
        other.eval()
        assert torch.equal(other(x), ddp(x))
        other.train()
        backward(other, [zoo.batch(0)])
        assert all(parameter.grad is not None for parameter in other.parameters())
    backward(ddp, [zoo.batch(0)])
    assert ddp.module[0].weight.grad is not None


def test_parameters_that_the_optimizer_does_not_hold_are_named(world: lockstep.World) -> None:
    model = zoo.build("mlp")
    names = "'2.weight', '2.bias', '4.weight', '4.bias'"
    with pytest.warns(LockstepWarning, match=f"the optimizer does not hold {names}: their grad"):
        lockstep.Stepper(model, sgd(model[0]))  # type: ignore[index]


def sums_of_overlapping_tensors(world: lockstep.World) -> list[list[float]]:
    """One tensor twice, and a view beside the whole, by gloo and by shared memory."""
    import lockstep.backend

    results = []
    for backend in ("gloo", lockstep.backend.NAME):
        group = dist.new_group(backend=backend)
        twice, whole = torch.ones(2) + world.rank, torch.arange(4.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            dist.all_reduce_coalesced([twice, twice], group=group)
            dist.all_reduce_coalesced([whole, whole[1:3]], group=group)
        results.append([*twice.tolist(), *whole.tolist()])
        dist.destroy_process_group(group)
    return results


def test_tensors_that_share_memory_are_summed_as_gloo_sums_them() -> None:
    for gloo, ours in on_team(sums_of_overlapping_tensors, 2):
        assert ours == gloo


def sparse_gradients(world: lockstep.World) -> list[Tensor]:
    """Those of torch's wrapper alone, and with the hook."""
    results = []
    for hook in (None, lockstep.shared_memory_hook):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
        wrapper = nn.parallel.DistributedDataParallel(module)
        if hook is not None:
            wrapper.register_comm_hook(None, hook)
        wrapper(torch.tensor([[world.rank, 5], [2, 3]])).square().sum().backward()
        results.append(module[0].weight.grad.to_dense())
    return results


def test_torchs_wrapper_with_the_hook_trains_sparse_embeddings() -> None:
    for alone, hooked in on_team(sparse_gradients, 2):
        assert zoo.distance(hooked, alone) < 1e-6


class WithoutElements(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(4, 2), nn.Parameter(torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.empty.sum(0)
        return output


def optimizer_shapes(world: lockstep.World, update: str) -> dict[int, dict[str, tuple[int, ...]]]:
    model = WithoutElements()
    optimizer = torch.optim.AdamW(model.parameters())
    stepper = lockstep.Stepper(model, optimizer, update=update, world=world)
    for x in stepper.micro_batches([torch.ones(3, 4)]):
        stepper.backward(model(x).square().sum(), weight=3)
    stepper.step()
    state = stepper.optimizer_state_dict()
    stepper.load_optimizer_state_dict(state)
    return {
        number: {name: tuple(value.shape) for name, value in values.items()}
        for number, values in state["state"].items()
    }


def test_the_sharded_state_has_parameters_without_elements_too() -> None:
    replicated, sharded = (
        on_team(optimizer_shapes, 2, (how,)) for how in ("replicated", "sharded")
    )
    assert len(replicated[0]) == 3
    assert sharded == replicated
