"""A witness: bits that change on one rank are found and named; what is right is left alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoints import folders
from lockstep.collectives.addition_order import slice_of
from lockstep.errors import CorruptResult, LockstepError
from lockstep.testing import run_ranks
from tests.data.datasets import Stream
from tests.refused import refused
from tests.teams import on_team

STEPS = 4  # the third is short, the fourth is of the next epoch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 400)
        self.norm = nn.BatchNorm1d(400)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(400, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.drop(F.relu(self.norm(self.first(x)))))
        return found


def samples(count: int = 70) -> TensorDataset:
    draws = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 8, generator=draws), torch.randint(0, 3, (count,), generator=draws)
    )


def flip(tensor: Tensor, element: int = 0, bit: int = 20) -> None:
    tensor.data.view(-1).view(torch.int32)[element] ^= 1 << bit


def do_nothing(training: Training) -> None:
    pass


class Training:
    """One on this rank. `hurt` is called with it at every micro-batch, after the loss."""

    def __init__(self, world: lockstep.World, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        kind = options.pop("optimizer", "AdamW")
        weights = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(weights, lr=1e-2, momentum=0.9)
            if kind == "SGD"
            else torch.optim.AdamW(weights, lr=1e-2, fused=kind == "fused")
        )
        options = {"exact": True, "witness": 1, "clip": 1.0, **options}
        self.stepper = lockstep.Stepper(self.model, self.optimizer, world=world, **options)
        self.loader = lockstep.Loader(samples(), global_batch=30, micro_batch=5, seed=3)
        self.rank, self.passes = world.rank, 0

    def run(
        self,
        hurt: Callable[[Training], None] = do_nothing,
        after: Callable[[Training], None] = do_nothing,
        steps: int = STEPS,
    ) -> str:
        for epoch in self.loader.epochs(100):
            for window in epoch:
                self.passes = 0
                for batch in self.stepper.micro_batches(window):
                    loss = F.cross_entropy(self.model(batch[0]), batch[1], reduction="sum")
                    self.passes += 1
                    hurt(self)
                    self.stepper.backward(loss, len(batch[1]))
                self.stepper.step()
                after(self)
                if self.stepper.steps == steps:
                    return self.sha256()
        raise AssertionError

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


Options = dict[str, Any]
WORLD_SIZES = [2, pytest.param(3, marks=pytest.mark.rest)]


def undisturbed(world: lockstep.World, options: Options) -> tuple[str, int | None]:
    training = Training(world, **options)
    sha256 = training.run()
    witness = training.stepper.witness
    return sha256, None if witness is None else witness.witnessed


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduce": "native"},
        {"update": "sharded"},
        {"update": "sharded", "reduce": "native", "optimizer": "SGD"},
        {"update": "sharded", "optimizer": "fused"},
    ],
    ids=str,
)
def test_the_same_bits_with_and_without_a_witness(world_size: int, options: Options) -> None:
    plain = {"witness": None, "optimizer": options.get("optimizer", "AdamW")}
    ((without, _),) = on_team(undisturbed, 1, (plain,))
    for sha256, witnessed in on_team(undisturbed, world_size, (options,)):
        assert sha256 == without
        assert witnessed == STEPS - 1


# -- one bit of rank 1 --------------------------------------------------------------------------

HURT = 2  # the step, counted from 1


def in_usual_pass(training: Training) -> bool:
    """Of the step that is hurt, on rank 1: whether it is walking its own second micro-batch."""
    return (
        training.rank == 1
        and training.stepper.steps == HURT - 1
        and training.passes == len(training.loader.share) + 2
    )


def landing(training: Training) -> None:
    """A bit of a gradient, before it lands."""
    if in_usual_pass(training):
        weight = training.model.first.weight

        def hurt(gradient: Tensor) -> Tensor:
            hook.remove()
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            flip(gradient, 7)
            return gradient

        hook = weight.register_hook(hurt)


def landed(training: Training) -> None:
    """A bit of what has landed."""
    if in_usual_pass(training):
        flip(training.stepper.reducer.buckets[0].sum)


def message(training: Training) -> None:
    """A bit of a sum, when it has arrived, in this rank's own slice."""
    size = training.stepper.group.size

    def how(start: Any, bucket: Any) -> Any:
        work = start(bucket)

        def wait(timeout: Any = None) -> None:
            work.wait(timeout)
            flip(bucket.sum, slice_of(bucket.sum.numel(), training.rank, size).start)

        return SimpleNamespace(wait=wait)

    if in_usual_pass(training):
        intercept(training, how)


def leaving(training: Training) -> None:
    """A bit of what has left for the sum, in the slice that rank 0 adds up."""
    if in_usual_pass(training):
        intercept(training, lambda start, bucket: (flip(bucket.sum), start(bucket))[1])


def intercept(training: Training, how: Callable[[Any, Any], Any]) -> None:
    """Start the next sum in this way, and further ones as usual."""
    reduction = training.stepper.reducer.reduction
    start = reduction.start

    def once(bucket: Any) -> Any:
        reduction.start = start  # type: ignore[method-assign]
        return how(start, bucket)

    reduction.start = once  # type: ignore[method-assign]


def refusal(
    world: lockstep.World,
    hurt: Callable[[Training], None],
    options: Options,
    after: Callable[[Training], None] = do_nothing,
) -> tuple[str, dict[str, Any], int]:
    training = Training(world, **options)
    try:
        training.run(hurt, after)
    except LockstepError as error:
        return error.code, error.values, training.stepper.steps
    return "", {}, training.stepper.steps


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "options",
    [{}, {"update": "sharded"}, pytest.param({"reduce": "native"}, marks=pytest.mark.rest)],
    ids=str,
)
def test_a_bit_that_changes_on_one_rank_is_named_with_step_rank_and_parameter(
    world_size: int, options: Options
) -> None:
    # a sum that is scattered is received by nobody else
    received = "corrupt-sum" if options.get("update") == "sharded" else "corrupt-message"
    for hurt, code in (
        (landing, "corrupt-micro-batch"),
        (landed, "corrupt-share"),
        (leaving, "corrupt-on-its-way"),
        (message, received),
    ):
        for raised, values, steps in on_team(refusal, world_size, (hurt, options)):
            assert raised == code, (hurt, values)
            assert (values["step"], list(values["ranks"]), steps) == (HURT, [1], HURT - 1)
            assert values["back"] == "does not come back"
            if hurt is landing:
                assert values["parameter"] == "first.weight"
            if code == "corrupt-micro-batch":
                assert values["slot"] == 6 // world_size + 1


def drawn(training: Training) -> None:
    """A micro-batch of slot 0, whoever computes it, that draws from the operating system."""
    if training.stepper.steps == HURT - 1:
        noise = int.from_bytes(os.urandom(2)) / 2**16
        training.model.last.bias.register_hook(lambda grad: grad + noise)


def always(training: Training) -> None:
    """Rank 1 multiplies wrong, and the same way every time."""
    if (training.rank, training.stepper.steps, training.passes) == (1, HURT - 1, 1):
        training.model.last.bias.register_hook(lambda grad: grad + 2**-10)


def test_what_differs_each_time_is_said_to_be_the_users_code() -> None:
    for world_size in (2, 3):
        for code, values, steps in on_team(refusal, world_size, (drawn, {})):
            assert code == "micro-batch-not-deterministic"
            assert (values["step"], values["parameter"], steps) == (HURT, "last.bias", HURT - 1)


def test_an_error_that_comes_back_names_its_rank_where_a_third_one_can_tell() -> None:
    for code, values, _ in on_team(refusal, 3, (always, {})):
        assert (code, list(values["ranks"])) == ("corrupt-micro-batch", [1])
        assert values["back"] == "comes back"
    for code, values, _ in on_team(refusal, 2, (always, {})):
        assert (code, values["ranks"]) == ("ranks-compute-differently", [0, 1])


def at_rest(what: str, training: Training) -> None:
    """A bit of rank 1's between two steps."""
    if (training.rank, training.stepper.steps) == (1, HURT - 1):
        weight = training.optimizer.param_groups[0]["params"][0]
        tensors = {
            "last.weight": training.model.last.weight,
            "norm.running_mean": training.model.norm.running_mean,
            "exp_avg/": training.optimizer.state[weight]["exp_avg"],
        }
        flip(tensors[what])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_bit_that_changes_between_two_witnessed_steps_names_its_rank(
    world_size: int, update: str
) -> None:
    options = {"update": update, "weights": "separate" if update == "sharded" else "auto"}
    for what in ("last.weight", "norm.running_mean", "exp_avg/"):
        after = partial(at_rest, what)
        for code, values, _ in on_team(refusal, world_size, (do_nothing, options, after)):
            assert (code, list(values["ranks"])) == ("corrupt-at-rest", [1])
            assert values["parameter"].startswith(what)


def updating(training: Training) -> None:
    """A bit of rank 1's slice, in its update of a witnessed step."""
    if (training.rank, training.stepper.steps, training.passes) == (1, HURT - 1, 1):

        def hurt(optimizer: Any, *_: Any) -> None:
            hook.remove()
            flip(optimizer.param_groups[0]["params"][0])

        hook = training.optimizer.register_step_post_hook(hurt)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_update_of_a_slice_is_repeated_by_another_rank(world_size: int) -> None:
    for optimizer in ("AdamW", "SGD", "fused"):
        options = {"update": "sharded", "optimizer": optimizer}
        for code, values, _ in on_team(refusal, world_size, (updating, options)):
            assert (code, values["step"], values["ranks"]) == ("corrupt-update", HURT, [1])
            assert values["back"] == "does not come back"


def costs(world: lockstep.World, witness: float | None) -> list[tuple[int, int]]:
    """For each of 12 steps the micro-batches that this rank computed, and the bytes it sent."""
    options = {"update": "sharded", "reduce": "native", "checks": "start"}
    training = Training(world, witness=witness, **options)
    of_steps = []
    sent = training.stepper.bytes_sent

    def note(training: Training) -> None:
        nonlocal sent
        of_steps.append((training.passes, training.stepper.bytes_sent - sent))
        sent = training.stepper.bytes_sent

    training.run(after=note, steps=12)
    return of_steps


def test_only_a_witnessed_step_repeats_the_update() -> None:
    """The others send what they send without a witness."""
    without = on_team(costs, 2, (None,))
    some = on_team(costs, 2, (0.3,))
    computed_more, sent_more = set(), set()
    for rank in range(2):
        for step, (now, before) in enumerate(zip(some[rank], without[rank], strict=True)):
            if now[0] > before[0]:
                computed_more.add(step)
            if now[1] > before[1]:
                sent_more.add(step)
    assert sent_more == computed_more
    assert 0 < len(sent_more) < 12


def change(training: Training) -> None:
    """Code of the user, which autograd's counters do not see."""
    training.model.last.weight.data.mul_(0.5)


def changing(world: lockstep.World) -> str:
    return Training(world).run(after=change)


def test_code_that_changes_weights_on_all_ranks_is_no_corruption() -> None:
    assert len(set(on_team(changing, 2))) == 1


def saving(world: lockstep.World, folder: str) -> tuple[str, int | None, list[int]]:
    """Saved after every step, and witnessed in some; what is left after a wrong one."""
    training = Training(world, witness=0.3)
    checkpoints = lockstep.Checkpoints(folder, training.stepper, training.loader, every=1, keep=99)
    witness = training.stepper.witness
    assert witness is not None

    def hurt(training: Training) -> None:
        if training.stepper.steps > 10 and training.rank == 1:
            landing_now(training)

    with refused("corrupt-micro-batch", CorruptResult, ranks=[1]) as refusal:
        training.run(hurt, after=lambda _: checkpoints.step() and None, steps=100)
    good = witness.witnessed
    assert good is not None
    assert f"after step {good}, " in refusal.value.values["told"]
    world.barrier()
    left = [folders.step_of(each) for each in folders.written(Path(folder))]
    again = lockstep.Checkpoints(folder, training.stepper, training.loader, every=1).resume()
    assert again is not None
    return refusal.value.code, again.step - good, left


def landing_now(training: Training) -> None:
    """Rank 1 computes one gradient wrong in every micro-batch, each time in another way."""
    noise = int.from_bytes(os.urandom(2)) / 2**8
    hook = training.model.last.bias.register_hook(
        lambda gradient: (hook.remove(), gradient + noise)[1]
    )


def test_what_was_saved_since_the_last_witnessed_step_is_set_aside(tmp_path: Path) -> None:
    for code, behind, left in run_ranks(saving, 2, (str(tmp_path),)):
        assert (code, behind) == ("corrupt-micro-batch", 0)
        assert left
    assert list(tmp_path.glob("set-aside-*"))


def test_a_witness_needs_exact_mode_and_a_share() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with refused("witness-without-exact", witness=0.5):
        lockstep.Stepper(model, optimizer, witness=0.5)
    for witness in (0, 1.5, "0%", "101%", "often"):
        with refused("wrong-value", name="witness"):
            lockstep.Stepper(model, optimizer, witness=witness, exact=True)


def misused(world: lockstep.World) -> None:
    if world.size == 1:
        with refused("witness-alone", witness=0.01):
            Training(world, witness="1%")
        return
    stream = lockstep.Loader(Stream(), global_batch=2, micro_batch=1)
    window = next(iter(next(iter(stream.epochs(1)))))
    with refused("witness-cannot-read", kind="StreamWindow"):
        next(iter(Training(world).stepper.micro_batches(window)))
    training = Training(world)
    window = next(iter(next(iter(training.loader.epochs(1)))))
    for _ in training.stepper.micro_batches(window):
        break
    with refused("loop-left-while-witnessed"):
        training.stepper.step()


def test_a_witness_needs_another_rank_its_window_and_the_whole_loop() -> None:
    on_team(misused, 1)
    on_team(misused, 2)


def witnessed(world: lockstep.World, witness: str | float) -> list[int]:
    """Which of 200 steps."""
    training = Training(world, witness=witness)
    assert training.stepper.witness is not None
    windows = chain.from_iterable(training.loader.epochs(100))
    return [
        step
        for step, window in enumerate(islice(windows, 200))
        if training.stepper.witness.due(window)
    ]


def test_so_many_steps_are_witnessed_and_not_in_regular_order() -> None:
    """Drawn by the seed, and equal on all ranks."""
    for witness, count in (("1%", 2), (0.1, 20), (0.3, 60), (1, 200)):
        first, second = on_team(witnessed, 2, (witness,))
        assert first == second
        assert len(first) == count
        gaps = {later - earlier for earlier, later in pairwise(first)}
        assert len(gaps) > 1 or count in (2, 200)
