"""A model cut into layers and stages: where, by what, under which names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.parts import Parts
from lockstep.errors import TaskError
from lockstep.model_parallel.layers import Layers, layers_of
from lockstep.model_parallel.split import ModelNames, balanced, by_parameters, cut
from lockstep.model_parallel.stages import stage_module
from lockstep.tasks.text import GPT
from tests.model_parallel.layered import Block, Halves, reader, sentences
from tests.refused import refused


def stages_of(layers: Layers, count: int) -> list[nn.Module]:
    return [stage_module(layers, part) for part in cut(layers, count)]


def through(stages: Sequence[nn.Module], *arguments: Any) -> Any:
    for stage in stages:
        arguments = (stage(*arguments),)
    return arguments[0]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        out: Tensor = self.d(y + self.c(self.b(y)))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm, self.after = nn.Linear(3, 3), nn.LSTM(3, 4), nn.Linear(4, 2)
        self.register_buffer("shift", torch.ones(2), persistent=False)
        self.other = nn.Linear(1, 1)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0
    ) -> dict[str, Tensor]:
        x = self.before(x)
        if mask is not None:
            x = x * mask
        hidden, _ = self.lstm(x)
        return {"out": self.after(hidden) * scale + self.shift}


def test_a_tuple_is_no_place_to_cut_and_an_argument_crosses_until_it_is_used() -> None:
    model = Recurrent()
    x, mask = torch.randn(5, 2, 3), torch.rand(5, 2, 3)
    for arguments in ((x,), (x, mask)):  # defaults stay what they are
        layers = layers_of(model, arguments=len(arguments))
        assert layers.names == ("before", "lstm", "after")
        stages = stages_of(layers, 3)
        assert isinstance(through(stages[:2], *arguments), Tensor)
        out = through(stages, *arguments)["out"]
        torch.testing.assert_close(out, model(*arguments)["out"])
    # what no layer uses stays with the last stage
    first, last = stages_of(layers_of(model), 2)
    assert {"other.weight", "other.bias"} <= dict(last.named_parameters()).keys()
    assert "shift" in dict(last.named_buffers())
    # shift is in none
    assert first.state_dict().keys() | last.state_dict().keys() == model.state_dict().keys()


def test_where_a_model_is_cut() -> None:
    names = ("bytes", "blocks.0", "blocks.1", "norm", "head")
    assert layers_of(GPT(16, 2, 8, 0.0)).names == names
    # what has no module joins the layer before it; a root's own parameter is where it is used
    layers = layers_of(reader(depth=2))
    assert layers.names == ("words", "blocks.0", "blocks.1", "head")
    assert "scale" in dict(stage_module(layers, range(2, 3)).named_parameters())
    # sequentials are gone into
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))
    nested = nn.Sequential(nn.Flatten(), inner, nn.Linear(4, 2))
    assert layers_of(nested).names == ("0", "1.0", "1.1", "1.2.0", "2")
    # not inside a residual connection at the root
    assert layers_of(Residual()).names == ("a", "b", "d")


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.same, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.same(self.same(x)))
        return out


def test_a_module_that_is_called_twice_is_two_layers_and_shared() -> None:
    layers = layers_of(Twice())
    assert layers.names == ("same", "same:2", "last")
    stages = [stage_module(layers, part) for part in (range(0, 1), range(1, 3))]
    assert ModelNames(layers.model).shared(stages) == {"same.weight": (0, 1), "same.bias": (0, 1)}


def test_train_and_eval_reach_the_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4).eval(), nn.Dropout(0.5), nn.BatchNorm1d(4))
    stage = stage_module(layers_of(model), range(1, 3))
    modes = [module.training for module in (model, *model)]
    assert modes == [True, False, True, True], "left as they were"
    x = torch.randn(6, 4)
    assert not torch.equal(stage(x), stage(x))
    stage.eval()
    assert torch.equal(stage(x), stage(x))
    assert not any(module.training for module in model)


class Branching(nn.Module):
    """A forward that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.body = nn.ModuleList([Block(3, 0.0), Block(3, 0.0)])
        self.last = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            raise ValueError("too much")
        x = self.first(x)
        for block in self.body:
            x = block(x)
        out: Tensor = self.last(x)
        return out


GIVEN = Parts(layers=lambda model: [model.first, *model.body, model.last])


def test_a_forward_that_cannot_be_followed_is_refused_with_the_way_out() -> None:
    with refused("forward-not-followed", TaskError, model="Branching") as caught:
        layers_of(Branching())
    assert "control flow" in caught.value.values["reason"]
    assert "Parts(layers=...)" in str(caught.value)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("model", "parts", "x"),
    [
        (reader(depth=3), None, sentences(1)[0][0]),
        (Branching(), GIVEN, torch.linspace(0, 1, 6).view(2, 3)),
    ],
    ids=["traced", "given"],
)
def test_stages_one_after_the_other_are_the_model_and_have_its_names(
    model: nn.Module, parts: Parts | None, x: Tensor, count: int
) -> None:
    stages = stages_of(layers_of(model, parts), count)
    assert torch.equal(through(stages, x), model(x))
    parameters: dict[str, nn.Parameter] = {}
    for stage in stages:
        parameters.update(stage.named_parameters())
    assert parameters.keys() == dict(model.named_parameters()).keys()
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())


def test_layers_that_are_not_the_models_are_refused() -> None:
    model = Branching()
    for layers, code, values in (
        ([nn.Linear(1, 1)], "not-a-layer", {"what": "Linear", "number": 0}),
        ([model.first, None], "not-a-layer", {"what": "NoneType", "number": 1}),
        ([model.first, model.first], "layer-given-twice", {"layer": "first"}),
    ):
        with refused(code, TaskError, **values):
            layers_of(model, Parts(layers=lambda _, layers=layers: layers))
    halves = nn.Sequential(Halves(), nn.Linear(1, 1))
    stage = stage_module(layers_of(halves, Parts(layers=list)), range(2))
    with refused("layer-gives-no-tensor", TaskError, layer="layer 0", what="tuple"):
        stage(torch.ones(2, 2))


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(F.dropout(self.a(x), 0.5, self.training))
        return out


def test_a_mode_baked_into_the_forward_is_refused() -> None:
    with refused("forward-depends-on-mode", TaskError, model="FunctionalDropout"):
        layers_of(FunctionalDropout())


def brute_force(costs: Sequence[int], stages: int) -> tuple[int, int]:
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    sums = [
        [sum(costs[a:b]) for a, b in itertools.pairwise([0, *cuts, len(costs)])] for cuts in every
    ]
    return min((max(each), sum(part * part for part in each)) for each in sums)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=9).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)))
    )
)
@example(([1, 6, 2, 4, 7], 4))
@example(([3, 4, 8, 1], 3))  # 3 | 4 | 8 1 has smaller squares, and a stage of 9
def test_no_cut_is_better(case: tuple[list[int], int]) -> None:
    costs, stages = case
    parts = balanced(costs, stages)
    assert [layer for part in parts for layer in part] == list(range(len(costs)))
    assert len(parts) == stages
    assert all(len(part) for part in parts)
    sums = [sum(costs[layer] for layer in part) for part in parts]
    assert (max(sums), sum(each * each for each in sums)) == brute_force(costs, stages)


def test_ties_are_cut_early() -> None:
    assert balanced([1, 1, 1], 2) == [range(0, 1), range(1, 3)]
    assert balanced([5, 0, 0, 5], 2) == [range(0, 1), range(1, 4)]


def test_more_stages_than_layers() -> None:
    words = layers_of(reader(depth=1))
    for layers, names in (
        (words, ["words", "blocks.0", "head"]),
        (layers_of(Branching(), Parts(layers=lambda model: [])), []),
        (layers_of(Halves()), []),
    ):
        with refused("too-few-layers", stages=4, count=len(names), layers=names):
            cut(layers, 4)


def test_stages_begin_where_parts_says() -> None:
    layers = layers_of(reader(depth=3))
    stages = cut(layers, 3, Parts(stages=["blocks.0", "head"]))
    assert stages == [range(0, 1), range(1, 4), range(4, 5)]


@pytest.mark.parametrize(
    ("stages", "code"),
    [
        (["blocks.7", "head"], "unknown-layer"),
        (["head", "blocks.0"], "stages-out-of-order"),
        (["words", "head"], "stages-out-of-order"),
        (["head"], "stages-out-of-order"),
    ],
)
def test_beginnings_that_cannot_be(stages: list[str], code: str) -> None:
    with refused(code, layers=["words", "blocks.0", "blocks.1", "head"]):
        cut(layers_of(reader(depth=2)), 3, Parts(stages=stages))


def test_costs_by_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1, bias=False))
    assert by_parameters(layers_of(model)) == [40.0, 0.0, 8.0]


def test_tied_weights_are_found_and_so_are_the_stages_that_share_them() -> None:
    model = reader(depth=2, tied=True)
    names, layers = ModelNames(model), layers_of(model)
    assert names.first("head.weight") == names.first("words.weight") == "words.weight"
    assert names.stored("head.weight") == names.stored("words.weight") == "head.weight"
    assert names.first("blocks.0.norm.bias") == names.stored("blocks.0.norm.bias")
    stages = [stage_module(layers, part) for part in cut(layers, 2, Parts(stages=["blocks.1"]))]
    assert names.shared(stages) == {"words.weight": (0, 1)}
    assert names.shared([stage_module(layers, range(len(layers)))]) == {}
