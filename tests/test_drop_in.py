"""What code written for torch's DDP does to its wrapper: keywords, hooks, join, checkpointing,
sparse gradients, odd inputs and outputs.
"""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import UsageError
from lockstep.testing import run_ranks
from tests import zoo
from tests.refused import refused

Pair = namedtuple("Pair", "logits features")


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    x, y = zoo.samples(512)
    rows = slice(4 * (4 * number + rank), 4 * (4 * number + rank) + 4)
    return x[rows], y[rows]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6, sparse=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.embed((x.abs() * 20).long().clamp(max=49)).mean(1))


class Tied(nn.Module):
    """A transformer layer with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed((x.abs() * 8).long().clamp(max=19))))[:, 0, :3]


class Branches(nn.Module):
    """Which branch is used depends on the step, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.calls = nn.Linear(6, 3), nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.left(x) if self.calls % 2 else self.right(x)


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})

    def forward(self, x: Tensor) -> dict[str, object]:
        features = torch.tanh(self.body(x))
        return {"a": self.heads["a"](features), "more": Pair(self.heads["b"](features), [features])}


def frozen() -> nn.Module:
    net = zoo.mlp()
    net[0].requires_grad_(False)
    return net


FAMILIES = {
    "mlp": zoo.mlp,
    "cnn": zoo.Convolutional,
    "rnn": zoo.Recurrent,
    "transformer": Tied,
    "branches": Branches,
    "embedding": Embedding,
    "frozen": frozen,
    "outputs": Outputs,
}


def loss_of(output: object, y: Tensor) -> Tensor:
    if isinstance(output, dict):
        return zoo.loss_sum(output["a"], y) + zoo.loss_sum(output["more"].logits, y)
    assert isinstance(output, Tensor)
    return zoo.loss_sum(output, y)


def train(world: lockstep.World, family: str, wrapper: str) -> list[Tensor]:
    """One script; only the wrapper's import differs."""
    torch.manual_seed(4)
    model = FAMILIES[family]()
    make = (
        nn.parallel.DistributedDataParallel
        if wrapper == "torch"
        else lockstep.DistributedDataParallel
    )
    ddp = make(
        model,
        find_unused_parameters=family == "branches",
        gradient_as_bucket_view=wrapper == "torch" and family != "embedding",
    )
    sgd = torch.optim.SGD(
        [parameter for parameter in ddp.parameters() if parameter.requires_grad],
        lr=0.02,
        momentum=0 if family == "embedding" else 0.9,
    )
    for step in range(20):
        x, y = batch(world.rank, step)
        sgd.zero_grad()
        loss_of(ddp(x), y).backward()
        sgd.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_swapping_the_import_gives_the_same_weights(family: str) -> None:
    theirs = run_ranks(train, 2, args=(family, "torch"))
    ours = run_ranks(train, 2, args=(family, "lockstep"))
    for a, b in zip(ours, theirs, strict=True):
        for number, (mine, other) in enumerate(zip(a, b, strict=True)):
            assert zoo.distance(mine, other) < 1e-6, number


def hooked(world: lockstep.World, wrapper: str, hook: str) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = (
        nn.parallel.DistributedDataParallel
        if wrapper == "torch"
        else lockstep.DistributedDataParallel
    )(model)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=0.5
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        ddp.register_comm_hook(
            None,
            {"fp16": default_hooks.fp16_compress_hook, "mean": default_hooks.allreduce_hook}[hook],
        )
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for step in range(6):
        x, y = batch(world.rank, step)
        sgd.zero_grad()
        zoo.loss_sum(ddp(x), y).backward()
        sgd.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("hook", ["mean", "fp16"])
def test_torchs_hooks_run_as_they_are(hook: str) -> None:
    theirs = run_ranks(hooked, 2, args=("torch", hook))
    ours = run_ranks(hooked, 2, args=("lockstep", hook))
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert zoo.distance(mine, other) < (1e-6 if hook == "mean" else 1e-3)


def test_powersgd_runs_and_keeps_the_replicas_equal() -> None:
    first, second = run_ranks(hooked, 2, args=("lockstep", "powersgd"))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def joined(world: lockstep.World, wrapper: str, by_all: bool) -> list[Tensor]:
    model = zoo.build("mlp")
    ddp = (
        nn.parallel.DistributedDataParallel
        if wrapper == "torch"
        else lockstep.DistributedDataParallel
    )(model)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.02)
    with ddp.join(divide_by_initial_world_size=by_all):
        for step in range(3 + 2 * world.rank):
            x, y = batch(world.rank, step)
            sgd.zero_grad()
            zoo.loss_sum(ddp(x), y).backward()
            sgd.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("by_all", [True, False])
def test_join_trains_on_uneven_inputs_as_torchs_does(by_all: bool) -> None:
    theirs = run_ranks(joined, 3, args=("torch", by_all))
    ours = run_ranks(joined, 3, args=("lockstep", by_all))
    for a, b in zip(ours, theirs, strict=True):
        for mine, other in zip(a, b, strict=True):
            assert zoo.distance(mine, other) < 1e-6
    for mine, other in zip(ours[0], ours[2], strict=True):
        assert torch.equal(mine, other)


def stops_early(world: lockstep.World) -> str:
    ddp = lockstep.DistributedDataParallel(zoo.build("mlp"))
    try:
        with ddp.join(throw_on_early_termination=True):
            for step in range(2 + world.rank):
                x, y = batch(world.rank, step)
                zoo.loss_sum(ddp(x), y).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing said"


def test_join_can_stop_all_ranks_with_the_first() -> None:
    first, second = run_ranks(stops_early, 2)
    assert first == "Rank 0 exhausted all inputs."
    assert "exhausted inputs" in second


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def checkpointed(world: lockstep.World, reentrant: bool | None) -> list[Tensor]:
    torch.manual_seed(3)
    model = Checkpointed(bool(reentrant))
    forward = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    for step in range(2):
        x, y = batch(world.rank, step)
        model.zero_grad()
        zoo.loss_sum(forward(x), y).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(3)
    plain = Checkpointed(False)
    for rank in range(2):
        x, y = batch(rank, 1)
        (zoo.loss_sum(plain(x), y) / 2).backward()
    for found in run_ranks(checkpointed, 2, args=(reentrant,)):
        for ours, parameter in zip(found, plain.parameters(), strict=True):
            assert parameter.grad is not None
            assert zoo.distance(ours, parameter.grad) < 1e-6


def statistics(world: lockstep.World) -> tuple[Tensor, Tensor, int]:
    model = zoo.build("cnn")
    ddp = lockstep.DistributedDataParallel(model, forward_sync_buffers=False)
    ddp(batch(world.rank, 0)[0])
    local = model.norm.running_mean.clone()
    ddp.sync_buffers()
    return local, model.norm.running_mean.clone(), int(model.norm.num_batches_tracked)


def test_without_forward_sync_buffers_statistics_stay_local_until_they_are_averaged() -> None:
    found = run_ranks(statistics, 3)
    mean = torch.stack([local for local, _, _ in found]).mean(0)
    for local, after, batches in found:
        assert not torch.equal(local, after)
        torch.testing.assert_close(after, mean)
        assert batches == 1


def in_groups(world: lockstep.World) -> list[Tensor]:
    """Two pairs of ranks, each averaging among itself."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model, process_group=groups[world.rank // 2])
    x, y = batch(world.rank, 0)
    zoo.loss_sum(ddp(x), y).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def test_a_process_group_averages_among_its_ranks() -> None:
    found = run_ranks(in_groups, 4)
    for pair in (0, 1):
        model = zoo.build("mlp")
        for rank in (2 * pair, 2 * pair + 1):
            x, y = batch(rank, 0)
            (zoo.loss_sum(model(x), y) / 2).backward()
        for rank in (2 * pair, 2 * pair + 1):
            for ours, parameter in zip(found[rank], model.parameters(), strict=True):
                assert parameter.grad is not None
                assert zoo.distance(ours, parameter.grad) < 1e-6


def ignoring(world: lockstep.World) -> tuple[Tensor, Tensor]:
    model = zoo.build("mlp")
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["0.weight"]
    )
    if world.rank:
        with torch.no_grad():
            model[0].weight += 1
    ddp = lockstep.DistributedDataParallel(model)
    x, y = batch(world.rank, 0)
    zoo.loss_sum(ddp(x), y).backward()
    return model[0].weight.detach().clone(), model[0].weight.grad.clone()


def test_ignored_parameters_are_left_alone() -> None:
    (first, first_gradient), (second, second_gradient) = run_ranks(ignoring, 2)
    assert torch.equal(first + 1, second)
    assert not torch.equal(first_gradient, second_gradient)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"device_ids": [0]}, "not-the-modules-device"),
        ({"output_device": 0}, "not-the-modules-device"),
        ({"clip": 1.0}, "needs-a-stepper"),
        ({"exact": True}, "needs-a-stepper"),
        ({"update": "sharded"}, "needs-a-stepper"),
        ({"mixed_precision": object()}, "keyword-without-meaning"),
        ({"dim": 1}, "keyword-without-meaning"),
        ({"checks": "none"}, "unknown-choice"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: dict[str, object], code: str) -> None:
    ((name, value),) = arguments.items()
    with lockstep.init(), refused(code, name=name, value=value):
        lockstep.DistributedDataParallel(zoo.build("mlp"), **arguments)  # type: ignore[arg-type]


def test_an_unknown_keyword_is_a_type_error_as_in_python() -> None:
    with lockstep.init(), pytest.raises(TypeError, match="unexpected keyword 'buket_cap_mb'"):
        lockstep.DistributedDataParallel(zoo.build("mlp"), buket_cap_mb=5)


def test_a_tensor_on_another_device_is_named() -> None:
    with lockstep.init():
        ddp = lockstep.DistributedDataParallel(Outputs())
        with refused(
            "input-on-another-device",
            argument="argument 0['x'][1]",
            device="meta",
            module="cpu (rank 0, local rank 0)",
        ):
            ddp({"x": [torch.zeros(1), torch.zeros(1, device="meta")]})


def over_one_axis(world: lockstep.World) -> tuple[Tensor, Tensor, str]:
    """Two pairs: the pair (0, 2) averages, and so does (1, 3)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "other"))
    model = zoo.build("mlp")
    ddp = lockstep.DistributedDataParallel(model, device_mesh=mesh["data"])
    x, y = batch(world.rank, 0)
    zoo.loss_sum(ddp(x), y).backward()
    try:
        lockstep.DistributedDataParallel(zoo.build("mlp"), device_mesh=mesh)
        said = ""
    except UsageError as error:
        said = str(error)
    grad = next(model.parameters()).grad
    assert grad is not None
    return grad.clone(), next(model.parameters()).detach().clone(), said


def test_a_mesh_says_which_ranks_average() -> None:
    found = run_ranks(over_one_axis, 4)
    for pair in ((0, 2), (1, 3)):
        plain = zoo.build("mlp")
        for rank in pair:
            x, y = batch(rank, 0)
            (zoo.loss_sum(plain(x), y) / 2).backward()
        expected = next(plain.parameters()).grad
        assert expected is not None
        for rank in pair:
            assert zoo.distance(found[rank][0], expected) < 1e-6
    assert zoo.distance(found[0][0], found[1][0]) > 1e-3
    assert all(
        "device_mesh has the axes data, other." in said and "[mesh-of-several-axes]" in said
        for *_, said in found
    )
