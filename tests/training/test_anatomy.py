"""What each rank leaves of where its time went: lines that fit together over ranks, and whom the
others waited for.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Loader, Stepper, testing
from lockstep.errors import LockstepWarning, Preempted
from lockstep.runtime.step_clock import StepTimes
from lockstep.step.step_result import StepResult
from lockstep.tools.report.rank_times import judged
from lockstep.training.anatomy import AnatomyFile, ends_line, in_detail, memory_use
from lockstep.training.timeline import read
from lockstep.updates.update import Applied
from lockstep.world.world import World
from tests.teams import on_team
from tests.training import toy

_DAWDLES = 0.15  # s


def test_lines_grow_rarer_and_every_step_is_in_one() -> None:
    ends = [step for step in range(1, 15_001) if ends_line(step)]
    assert ends[:1000] == list(range(1, 1001))
    assert ends[1000:2000] == list(range(1002, 3001, 2))
    assert ends[2000:3000] == list(range(3004, 7001, 4))
    assert ends[3000:4000] == list(range(7008, 15_001, 8))
    detailed = [step for step in range(1, 3000) if in_detail(step)]
    assert detailed == [*range(1, 21), *range(100, 1001, 100)]


def lines(run: Path, rank: int) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (run / "anatomy" / f"rank-{rank}.jsonl").read_text().splitlines()
        if line
    ]


def train(
    world: World, run: str, steps: int, slow: tuple[int, str] | None, reduce: str = "auto"
) -> None:
    """A linear model over 12 samples a step, four of each rank; another gradient on every rank."""
    if slow is not None:
        testing.slow_at(slow[0], 1, slow[1], _DAWDLES)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    stepper = Stepper(model, torch.optim.AdamW(model.parameters()), reduce=reduce, world=world)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    loader = Loader(data, global_batch=12, micro_batch=2, seed=0, rank=world.rank, size=world.size)
    with AnatomyFile(Path(run), stepper, {"workers": world.size}) as file:
        for epoch in loader.epochs(steps // 4):
            for window in epoch:
                for x, y in stepper.micro_batches(window):
                    stepper.backward(((model(x) - y) ** 2).sum(), weight=len(y))
                file.step(stepper.step(), window)
        file.end(stepper.steps)
    testing.no_faults()


@pytest.mark.parametrize(
    ("phase", "where", "reduce"),
    [
        ("forward", "forward", "auto"),
        ("reduce", "moving", "auto"),
        ("optimizer", "optimizer", "native"),
    ],
)
def test_a_slow_rank_is_seen_where_it_is_slow_and_the_others_wait_for_it(
    tmp_path: Path, phase: str, where: str, reduce: str
) -> None:
    on_team(train, 3, (str(tmp_path), 8, (1, phase), reduce))
    phases = ("data", "forward", "backward", "exposed", "optimizer", "checks", "other")
    for rank in range(3):
        steps = [line for line in lines(tmp_path, rank) if line["kind"] == "steps"]
        spans = [(line["first"], line["last"]) for line in steps]
        assert spans == [(step, step) for step in range(1, 9)]
        assert all(line["samples"] == 4 and line["micro_batches"] == 2 for line in steps)
        later = steps[2:7]
        assert (median(line[where] for line in later) > _DAWDLES) == (rank == 1)
        if rank != 1:
            assert median(line.get("lost", {}).get("1", 0.0) for line in later) > 0.5 * _DAWDLES
        for line in steps:
            parts = sum(line[phase] for phase in phases)
            assert parts == pytest.approx(line["seconds"], abs=1e-6)
            assert line["exposed"] == pytest.approx(line["moving"] + line["waits"], abs=1e-6)
        kinds = Counter(line["kind"] for line in lines(tmp_path, rank))
        assert (kinds["begin"], kinds["memory"], kinds["end"]) == (1, 2, 1)


def test_one_rank_waits_for_nobody_and_spans_fill_its_steps(tmp_path: Path) -> None:
    file = tmp_path / "anatomy" / "rank-0.jsonl"
    file.parent.mkdir()
    file.write_text('{"kind": "begin"}\n{"kind": "ste')
    toy.alone(train, str(tmp_path), 8, None)
    _, half, *rows = file.read_text().splitlines()
    assert half == '{"kind": "ste'
    begin, *rest = map(json.loads, rows)
    assert begin["kind"] == "begin"
    steps = [line for line in rest if line["kind"] == "steps"]
    assert all("lost" not in line for line in steps)
    for line in steps[1:]:
        spans = line["spans"]
        assert all(end == begin for (_, _, end), (_, begin, _) in itertools.pairwise(spans))
        assert spans[-1][2] - spans[0][1] == pytest.approx(line["seconds"], abs=1e-5)
        assert {name for name, _, _ in spans} >= {"data", "forward", "backward", "optimizer"}


def slow_to_evaluate(output: Tensor, batch: Any) -> dict[str, tuple[Tensor, int]]:
    time.sleep(_DAWDLES)
    return toy.metrics(output, batch)


def run_toy(world: World, run: str, blocked: bool) -> list[str]:
    def block(record: Any) -> None:
        Path(run, "timeline.json").mkdir(exist_ok=True)

    task = toy.task(on_step=block if blocked else None, metrics=slow_to_evaluate)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lockstep.train(task, steps=4, run=run, world=world)
    return [str(each.message) for each in said if issubclass(each.category, LockstepWarning)]


def test_a_training_by_whatever_launcher_leaves_a_timeline_of_all_ranks(tmp_path: Path) -> None:
    assert on_team(run_toy, 3, (str(tmp_path), False)) == [[], [], []]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    steps = Counter(
        (event["pid"], event["args"]["step"]) for event in events if event.get("cat") == "step"
    )
    # spans are asked for as a step ends
    assert steps == dict.fromkeys(((rank, step) for rank in range(3) for step in range(2, 5)), 1)
    for rank in range(3):  # the evaluation after the last step is told too
        *before, last = lines(tmp_path, rank)
        pauses = [line for line in before if line["kind"] == "pause"]
        evaluations = [line for line in pauses if line["what"] == "evaluate"]
        assert [line["step"] for line in evaluations] == [4]
        assert evaluations[0]["seconds"] > _DAWDLES
        assert last["kind"] == "end"


def test_a_timeline_that_cannot_be_written_costs_a_warning_and_no_training(tmp_path: Path) -> None:
    (warning,) = toy.alone(run_toy, str(tmp_path), True)
    assert "timeline.json cannot be written" in warning
    assert (tmp_path / "result.json").exists()


def lagging(world: World, run: str) -> None:
    """As on a GPU: what steps came to is known two steps later, and of the last ones never."""
    model = torch.nn.Linear(2, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    loader = Loader(TensorDataset(torch.randn(4, 2)), global_batch=4, micro_batch=2, rank=0, size=1)
    (window,) = next(loader.epochs(1))
    phases = {"data": 1.0, "forward": 2.0, "backward": 3.0, "moving": 0.5, "waits": 0.25}
    others = {"optimizer": 1.0, "checks": 0.0, "other": 0.0, "hidden": None}
    times = StepTimes(step=0, **phases, **others)
    result = StepResult(
        **{"loss": 0.0, "weight": 1.0, "step": 1, "stop": False},
        **{"samples_by_rank": (4,), "bytes_sent": 0, "outcome": Applied()},
    )
    with AnatomyFile(Path(run), stepper, {}) as file:
        for step in range(1, 6):
            earlier = replace(times, step=step - 2, evaluate=7.0 if step == 4 else 0.0)
            file.step(replace(result, times=(earlier,) if step > 2 else ()), window)


def test_times_that_come_later_stand_in_the_line_of_their_step(tmp_path: Path) -> None:
    toy.alone(lagging, str(tmp_path))
    steps, (pause,) = (
        [line for line in lines(tmp_path, 0) if line["kind"] == kind] for kind in ("steps", "pause")
    )
    assert [line["first"] for line in steps] == [1, 2, 3]
    assert {(line["seconds"], line["hidden"]) for line in steps} == {(7.75, None)}
    assert (pause["what"], pause["step"], pause["seconds"]) == ("evaluate", 1, 7.0)


def counted(world: World) -> dict[str, int | None]:
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 50, bias=False), torch.nn.ReLU(), torch.nn.Linear(50, 10, bias=False)
    )
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), fused=True), world=world)
    for _ in range(2):
        for x in stepper.micro_batches([torch.randn(8, 100)]):
            stepper.backward(model(x).sum(), weight=1.0)
        stepper.step()
    return memory_use(stepper)


def test_memory_is_counted_by_what_it_is_for() -> None:
    use = toy.alone(counted)
    weights = 4 * (100 * 50 + 50 * 10)
    assert use["parameters"] == weights
    assert use["gradients"] >= weights
    assert 2 * weights <= (use["optimizer"] or 0) <= 2 * weights + 16


def stopped(world: World, run: str) -> None:
    def stop(record: Any) -> None:
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        lockstep.train(toy.task(on_step=stop), run=run, world=world)


def test_a_rank_that_stops_as_it_is_asked_to_has_left_as_it_should(tmp_path: Path) -> None:
    toy.alone(stopped, str(tmp_path))
    timeline = read(tmp_path)
    assert timeline is not None
    assert [lane.ended for lane in timeline.starts[0].lanes.values()] == [True]


def at_a_server(world: World, run: str) -> None:
    lockstep.train(toy.task(), update="server", epochs=2, run=run, world=world)


def test_at_a_server_every_rank_numbers_its_own_steps(tmp_path: Path) -> None:
    on_team(at_a_server, 2, (str(tmp_path),))
    found = read(tmp_path)
    assert found is not None
    assert not found.unread
    for lane in found.starts[0].lanes.values():
        assert [line.first for line in lane.steps] == list(range(1, len(lane.steps) + 1))
        assert all(line.count == 1 and not line.lost for line in lane.steps)
    verdict_of = judged(found.starts[0])
    assert verdict_of is not None
    assert not any(member.lost for member in verdict_of.members.values())
