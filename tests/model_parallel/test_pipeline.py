"""Pipelines over real processes: the gradients of one process, whatever the schedule, the ranks
and the micro-batches; and what goes wrong.

A pipeline's steps on the step clock: forwards and backwards are computed, and all between
them waited.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import World
from lockstep.config.parts import Parts
from lockstep.errors import LockstepWarning, WorkerFailed
from lockstep.model_parallel.layers import layers_of
from lockstep.model_parallel.pipeline import Pipeline
from lockstep.model_parallel.schedules import NAMES
from lockstep.model_parallel.split import cut
from lockstep.model_parallel.stages import stage_module
from lockstep.runtime import status
from lockstep.runtime.step_clock import StepClock, StepTimes
from lockstep.testing import run_ranks
from tests.model_parallel.layered import Block, reader, sentences

CPU = torch.device("cpu")


def pipelined(
    world: World, model: nn.Module, schedule: str, parts: Parts | None = None, **options: Any
) -> Pipeline:
    """This rank's stage of a model that all ranks have."""
    layers, group = layers_of(model, parts), world.group
    stage = stage_module(layers, cut(layers, group.size, parts)[group.rank])
    return Pipeline(stage, group, CPU, schedule, **options)


def with_each(world: World, fn: Callable[[World, str], None], schedules: Sequence[str]) -> None:
    """Several in the same processes: starting them takes longer than the test."""
    for schedule in schedules:
        fn(world, schedule)


def weighted(number: int, output: Tensor) -> Tensor:
    """Another loss in each micro-batch, so that none can be taken for another."""
    return ((number + 1) * output.sin()).sum()


def gradients(
    model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], times: int = 1
) -> dict[str, Tensor]:
    """Those of one process."""
    for _ in range(times):
        for number, arguments in enumerate(inputs):
            weighted(number, model(*arguments)).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@cache
def gradients_of_windows(count: int, last: int) -> dict[str, Tensor]:
    """The same for all schedules."""
    return gradients(reader(), sentences(count, last), times=2)


def compare(pipeline: Pipeline, expected: dict[str, Tensor]) -> None:
    """In float64 the order of additions does not matter, so that every difference is a mistake."""
    for name, parameter in pipeline.stage.named_parameters():
        where = f"{pipeline.schedule}, {name}"
        assert (parameter.grad is not None) == (name in expected), where
        if parameter.grad is not None:
            torch.testing.assert_close(
                parameter.grad,
                expected[name],
                rtol=1e-8,
                atol=1e-10,
                msg=lambda text, where=where: f"{where}: {text}",
            )


# -- the gradients of one process ----------------------------------------------------------------


def trains(world: World, schedule: str) -> list[str]:
    """Windows of several lengths, the last micro-batch shorter, each window twice. What was
    warned of.
    """
    said = []
    for count, last in ((1, 3), (7, 2), (5, 3)):
        inputs = sentences(count, last)
        pipeline = pipelined(world, reader(), schedule)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", LockstepWarning)
            for _ in range(2):
                pipeline.train(inputs, weighted)
        said += [str(each.message) for each in caught if issubclass(each.category, LockstepWarning)]
        compare(pipeline, gradients_of_windows(count, last))
    return said


def trains_with_each(world: World) -> dict[str, list[str]]:
    return {schedule: trains(world, schedule) for schedule in NAMES}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(ranks: int) -> None:
    said = run_ranks(trains_with_each, ranks)
    assert not any(any(each.values()) for each in said[1:])  # rank 0 speaks for all
    assert [name for name in ("naive", "gpipe") if said[0][name]] == []
    if ranks == 1:
        assert not any(said[0].values())
    if ranks == 4:
        assert len(said[0]["1f1b"]) == 2  # once for a pipeline, of which two have such windows
        for warning in said[0]["1f1b"]:
            assert "there are 1 for 4" in warning
            assert "the ranks idle for 75%" in warning


def evaluates(world: World, schedule: str) -> None:
    inputs = sentences(7, 2)
    model = reader(dropout=0.5)
    pipeline = pipelined(world, model, schedule)
    pipeline.stage.eval()
    found: dict[int, Tensor] = {}
    pipeline.forward(inputs, found.__setitem__)
    model.eval()
    assert sorted(found) == (list(range(7)) if world.rank == world.size - 1 else [])
    for number, output in found.items():
        torch.testing.assert_close(output, model(*inputs[number]))
        assert not output.requires_grad
    pipeline.stage.train()  # and back to training
    assert all(parameter.grad is None for parameter in pipeline.stage.parameters())
    pipeline.train(inputs[:6], weighted)
    pipeline.forward(inputs, found.__setitem__)
    pipeline.train([], weighted)


@pytest.mark.parametrize("ranks", [1, 3])
def test_evaluation_gives_each_output_with_its_number(ranks: int) -> None:
    run_ranks(with_each, ranks, (evaluates, NAMES))


def seeded(number: int, stage: int) -> None:
    torch.manual_seed(100 * number + stage)


def drops_out(world: World, schedule: str) -> None:
    inputs = sentences(6)
    pipeline = pipelined(world, reader(dropout=0.5), schedule)
    torch.manual_seed(world.rank)
    pipeline.train(inputs, weighted, seeded)
    layers = layers_of(reader(dropout=0.5))
    stages = [stage_module(layers, part) for part in cut(layers, world.size)]
    for number, (x,) in enumerate(inputs):
        for each, stage in enumerate(stages):
            seeded(number, each)
            x = stage(x)
        weighted(number, x).backward()
    compare(
        pipeline,
        {
            name: parameter.grad
            for name, parameter in layers.model.named_parameters()
            if parameter.grad is not None
        },
    )


def test_dropout_follows_the_seed_of_micro_batch_and_stage() -> None:
    run_ranks(with_each, 2, (drops_out, NAMES))


def in_bf16(world: World, schedule: str) -> None:
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.linspace(-1, 1, parameter.numel()).roll(number).view_as(parameter)
            )
    inputs = [
        (torch.randn(4, 6, generator=torch.Generator().manual_seed(number)),) for number in range(4)
    ]
    pipeline = pipelined(world, model, schedule, autocast=autocast)
    seen = []
    hook = pipeline.stage.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    pipeline.train(inputs, lambda number, output: weighted(number, output.float()))
    assert set(seen) == {torch.bfloat16}
    hook.remove()
    mine = {
        name: p.grad.clone() for name, p in pipeline.stage.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    for number, arguments in enumerate(inputs):
        with autocast():
            output = model(*arguments)
        weighted(number, output.float()).backward()
    whole = dict(model.named_parameters())
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, whole[name].grad, rtol=1e-2, atol=1e-2)


def test_activations_of_bf16_travel() -> None:
    run_ranks(with_each, 2, (in_bf16, ("gpipe", "1f1b")))


# -- models that are not all alike ---------------------------------------------------------------


class Shift(nn.Module):
    """Ids to ids: no parameter, and nothing with a gradient to send back."""

    def forward(self, ids: Tensor) -> Tensor:
        return (ids + 1) % 11


class Adds(nn.Module):
    """The gradients of both parameters are one tensor to autograd, and the one that arrives from
    the next stage where this is the last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 6)), nn.Parameter(torch.ones(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


def adds(world: World, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *[module for _ in range(4) for module in (nn.Linear(6, 6), Adds())]
    ).double()
    inputs = [(torch.full((3, 6), float(number), dtype=torch.float64),) for number in range(4)]
    pipeline = pipelined(world, model, schedule, Parts(stages=["4"]))
    for _ in range(3):
        pipeline.train(inputs, weighted)
    mine = {
        name: p.grad.clone() for name, p in pipeline.stage.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    for name, gradient in gradients(model, inputs, times=3).items():
        if name in mine:
            torch.testing.assert_close(
                mine[name], gradient, msg=lambda text, name=name: f"{schedule}, {name}: {text}"
            )


def test_gradients_that_are_one_tensor_to_autograd() -> None:
    run_ranks(with_each, 2, (adds, NAMES))


class Turned(nn.Module):
    """A view that is not contiguous, and so are gradients that come through it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2)


def views(world: World, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4),
        Turned(),
        Turned(),
        nn.Flatten(0, 1),
        nn.Linear(4, 4),
        Turned(),
        nn.Flatten(1),
        nn.Identity(),
    ).double()
    inputs = [(torch.full((2, 3, 4), float(number), dtype=torch.float64),) for number in range(4)]
    for begins in (["2"], ["3"], ["4"], ["6"], ["7"]):
        model.zero_grad()
        pipeline = pipelined(world, model, schedule, Parts(stages=begins))
        pipeline.train(inputs, weighted)
        mine = {
            name: p.grad.clone()
            for name, p in pipeline.stage.named_parameters()
            if p.grad is not None
        }
        model.zero_grad()
        expected = gradients(model, inputs)
        for name, gradient in mine.items():
            torch.testing.assert_close(
                gradient, expected[name], msg=lambda text, name=name: f"{schedule}, {name}: {text}"
            )


def test_views_are_sent_and_so_are_their_gradients() -> None:
    run_ranks(with_each, 2, (views, ("gpipe", "1f1b")))


class Answer(nn.Module):
    """An output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"logits": self.head(x), "note": "text"}


def oddities() -> nn.Sequential:
    torch.manual_seed(7)
    model = nn.Sequential(
        Shift(),
        nn.Embedding(11, 6),
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        Block(6, 0.0),
        Answer(),
    )
    model[2].requires_grad_(False)
    return model.double()


def odd(world: World, schedule: str) -> None:
    for begins in (["1", "2"], ["2", "3"], ["3", "4"]):
        oddly(world, schedule, begins)


def oddly(world: World, schedule: str, begins: list[str]) -> None:
    model, inputs = oddities(), sentences(4)
    pipeline = pipelined(world, oddities(), schedule, Parts(layers=list, stages=begins))
    pipeline.train(inputs, lambda number, output: weighted(number, output["logits"]))
    for number, arguments in enumerate(inputs):
        weighted(number, model(*arguments)["logits"]).backward()
    compare(
        pipeline,
        {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    )
    kinds = []
    pipeline.forward(inputs, lambda number, output: kinds.append(type(output)))
    assert set(kinds) <= {dict}


def test_ids_between_stages_frozen_stages_writing_in_place_and_a_dict_in_the_end() -> None:
    run_ranks(with_each, 3, (odd, NAMES))


def counts(world: World) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Dropout(0.5),
        nn.BatchNorm1d(4),
        nn.Linear(4, 4),
        nn.Dropout(0.5),
        nn.BatchNorm1d(4),
    )
    pipeline = pipelined(world, model, "1f1b", Parts(stages=["3"]))
    inputs = [(torch.full((3, 4), float(number)) + torch.eye(3, 4),) for number in range(5)]
    state = torch.get_rng_state()
    pipeline._by_shape(inputs)
    same = torch.equal(state, torch.get_rng_state())
    pipeline.train(inputs, weighted)
    (norm,) = [module for module in pipeline.stage.modules() if isinstance(module, nn.BatchNorm1d)]
    assert norm.num_batches_tracked is not None
    return int(norm.num_batches_tracked), same


def test_working_out_shapes_leaves_no_trace() -> None:
    assert run_ranks(counts, 2) == [(5, True)] * 2


def grows(world: World) -> int:
    pipeline = pipelined(world, reader(depth=2), "1f1b")
    inputs = [
        arguments
        for length in range(1, 7)
        for size in (1, 2)
        for arguments in sentences(2, size, length)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LockstepWarning)
        for _ in range(2):
            pipeline.train(inputs, weighted)
    compare(pipeline, gradients(reader(depth=2), inputs, times=2))
    return len(pipeline._schedules)


def test_places_for_what_arrives_are_kept_for_a_few_shapes_only() -> None:
    assert run_ranks(grows, 2) == [8, 8]


def fires(world: World, schedule: str) -> dict[str, int]:
    pipeline = pipelined(world, reader(), schedule)
    fired: dict[str, int] = {}
    for name, parameter in pipeline.stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: fired.__setitem__(name, fired.get(name, 0) + 1)
        )
    pipeline.train(sentences(4), weighted)
    return fired


def fires_with_each(world: World) -> dict[str, dict[str, int]]:
    return {schedule: fires(world, schedule) for schedule in NAMES}


def test_hooks_fire_in_each_micro_batch() -> None:
    first, second = run_ranks(fires_with_each, 2)
    for schedule in NAMES:
        assert first[schedule] | second[schedule] == {
            name: 4 for name, _ in reader().named_parameters()
        }


# -- nothing is pickled --------------------------------------------------------------------------


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("an object was sent to another rank")


def without_objects(world: World, schedule: str) -> None:
    for name in [name for name in dir(dist) if "object" in name and callable(getattr(dist, name))]:
        setattr(dist, name, refuse)
        setattr(dist.distributed_c10d, name, refuse)
    assert dist.send_object_list is refuse
    inputs = sentences(4, 2)
    pipeline = pipelined(world, reader(), schedule)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LockstepWarning)
        pipeline.train(inputs, weighted)
    pipeline.forward(inputs, lambda number, output: None)
    compare(pipeline, gradients(reader(), inputs))


def test_nothing_is_pickled() -> None:
    run_ranks(with_each, 2, (without_objects, NAMES))


# -- what goes wrong -----------------------------------------------------------------------------


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, :1], x[:, 1:]


class Fussy(nn.Module):
    def __init__(self, when: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if self.when(x):
            raise KeyError("no such word")
        out: Tensor = self.layer(x)
        return out


def runs(world: World, model: nn.Module, call: str = "train", parts: Parts | None = None) -> None:
    pipeline = pipelined(world, model, "1f1b", parts)
    inputs = [(torch.full((2, 4), float(number)),) for number in range(3)]
    if call == "train":
        pipeline.train(inputs, weighted)
    else:
        pipeline.forward(inputs, lambda number, output: None)


@pytest.mark.parametrize("call", ["train", "forward"])
def test_a_stage_that_does_not_fit_the_one_before_fails_with_a_note(call: str) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    )
    with pytest.raises(WorkerFailed, match="mat1 and mat2 shapes") as failed:
        run_ranks(runs, 3, (model, call, Parts(stages=["2", "4"])))
    assert failed.value.rank == 1
    note = "In stage 1 of the pipeline (layers 2 to 3), on float32 [2, 5] of the stage before."
    assert note in str(failed.value)


def test_a_stage_that_ends_in_a_tuple_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Halves(), nn.Linear(1, 1))
    with pytest.raises(WorkerFailed, match="layers 0 to 1 returned a tuple") as failed:
        run_ranks(runs, 2, (model, "train", Parts(stages=["2"])))
    assert failed.value.rank == 0
    assert "[layer-gives-no-tensor]" in str(failed.value)


def always(x: Tensor) -> bool:
    return True


def on_twos(x: Tensor) -> bool:
    return x.numel() > 0 and bool((x == 2.0).all())


def test_an_error_of_the_users_while_shapes_are_worked_out_is_its_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fussy(always), nn.Linear(4, 4))
    with pytest.raises(WorkerFailed, match="KeyError: 'no such word'") as failed:
        run_ranks(runs, 3, (model,))
    assert failed.value.rank == 1


def fails_alone(world: World, where: str, schedule: str) -> None:
    """On one rank: there is nobody to wait for it."""
    model = nn.Sequential(
        Fussy(on_twos if where == "forward" else lambda x: False), nn.Linear(4, 4)
    )
    pipeline = pipelined(world, model, schedule)
    inputs = [(torch.full((2, 4), float(number)),) for number in range(3)]

    def loss(number: int, output: Tensor) -> Tensor:
        if where == "loss" and number == 1:
            raise KeyError("no such word")
        if where == "backward" and number == 1:
            output.register_hook(throw)
        return weighted(number, output)

    with pytest.raises(KeyError, match="no such word"):
        pipeline.train(inputs, loss)
    for each in model.parameters():
        each.grad = None
    inputs = [*inputs[:2], inputs[0]]
    pipeline.train(inputs, weighted)  # and it is not left in the middle of something
    found = {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }
    model.zero_grad()
    for name, gradient in gradients(model, inputs).items():
        torch.testing.assert_close(found[name], gradient)


def throw(gradient: Tensor) -> None:
    raise KeyError("no such word")


def fails_everywhere(world: World, schedule: str) -> None:
    for where in ("forward", "loss", "backward"):
        fails_alone(world, where, schedule)


def test_what_the_users_code_raises_arrives_as_it_is() -> None:
    run_ranks(with_each, 1, (fails_everywhere, NAMES))


def fails_among_others(world: World) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        Fussy(lambda x: world.rank == 1 and not bool((x == 0).all())),
        nn.Linear(4, 4),
    )
    pipelined(world, model, "1f1b").train([(torch.ones(2, 4),)] * 4, weighted)


def test_a_rank_that_fails_in_the_middle_is_blamed_with_its_own_error() -> None:
    with pytest.raises(WorkerFailed, match="KeyError: 'no such word'") as failed:
        run_ranks(fails_among_others, 3)
    assert failed.value.rank == 1


class Ragged(nn.Module):
    """As many rows as there are ones."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x[:, 0] != 2.0]


def test_a_shape_that_depends_on_values_is_refused() -> None:
    with pytest.raises(
        WorkerFailed,
        match=(
            r"TaskError: stage 0 \(layer 0\) returned float32 \[0, 4\], but float32 \[2, 4\] for"
            r" another.*\[stage-output-varies\]"
        ),
    ):
        run_ranks(
            trains_or_raises, 2, (nn.Sequential(Ragged(), nn.Linear(4, 4)), Parts(layers=list))
        )


def trains_or_raises(world: World, model: nn.Module, parts: Parts) -> None:
    pipelined(world, model, "gpipe", parts).train(
        [(torch.full((2, 4), float(number)),) for number in range(3)], weighted
    )


_SLEEPS = 0.05  # s, a micro-batch on the second stage
_COUNT = 6


class Dawdles(nn.Linear):
    """Takes its time forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(_SLEEPS)
        return super().forward(x)


def timed(world: World) -> tuple[StepTimes, StepTimes]:
    """A window trained, and one run forward only: the second is no part of a step."""
    stage = nn.Linear(4, 4) if world.rank == 0 else Dawdles(4, 4)
    pipeline = Pipeline(stage, world.group, torch.device("cpu"), "1f1b")
    inputs = [(torch.randn(2, 4),) for _ in range(_COUNT)]
    pipeline.train(inputs, lambda number, output: output.sum())
    clock = StepClock()
    status.open_clock(clock)
    pipeline.train(inputs, lambda number, output: output.sum())
    clock.end(1)
    with status.inside("evaluate"):
        pipeline.forward(inputs, lambda number, output: None)
    clock.end(2)
    trained, evaluated = clock.finished()
    return trained, evaluated


def test_a_stage_that_is_quick_waits_for_one_that_is_not() -> None:
    quick, slow = run_ranks(timed, 2)
    assert slow[0].forward >= _COUNT * _SLEEPS
    assert slow[0].waits < quick[0].waits
    assert quick[0].waits >= (_COUNT - 2) * _SLEEPS
    for trained, evaluated in (quick, slow):
        assert trained.backward > 0
        assert evaluated.evaluate > _SLEEPS
        assert evaluated.forward == 0
