"""Steps of recorded runs, computed again: the recorded numbers, and what they are made of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lockstep
from lockstep import runs
from lockstep.config.settings import Settings
from lockstep.tools.replay.bisect_run import first_irreproducible, in_words
from lockstep.tools.replay.computed import ComputedStep, Detail
from lockstep.tools.replay.samples import row_of
from lockstep.tools.replay.steps import compare, compute, plan_of, ranks_by_slot, steps_of
from tests.cli.command import command
from tests.refused import refused
from tests.tools.replay import spiky

STEPS = 15
TASK = Path(spiky.__file__)


def trained(path: Path, *, workers: int = 3, exact: bool = True, **options: object) -> Path:
    flags = {"exact": True} if exact else {}
    command(
        "train", str(TASK), run=path, workers=workers, device="cpu", checkpoint_every=6,
        keep="all", log="csv", **flags, **options,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact run of 3 workers, whose sample 29 has a wrong scale."""
    return trained(tmp_path_factory.mktemp("exact") / "run", set=[f"bad={spiky.BAD}"])


def replayed(
    path: Path, step: str, workers: int | None = None, samples: int = 0
) -> list[ComputedStep]:
    run = runs.read(path)
    first, last = steps_of(step, run)
    plan = plan_of(run, first, last, workers=workers, device="cpu")
    steps = compute(plan, Detail(first=first, last=last, samples=samples)).steps
    return [step for step in steps if step.step >= first]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# -- the recorded numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, pytest.param(5, marks=pytest.mark.rest)])
def test_every_step_of_an_exact_run_has_the_recorded_bits(exact: Path, workers: int) -> None:
    before = contents(exact)
    run = runs.read(exact)
    steps = replayed(exact, f"1:{STEPS}", workers)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    for step, record in zip(steps, run.steps, strict=True):
        assert (step.loss, step.weight, step.lr) == (record.loss, record.weight, record.lr)
        assert step.gradient_norm == record.grad_norm
    assert contents(exact) == before, "a replay only reads"


@pytest.mark.parametrize("step", ["7", "13:14", "last"])
def test_a_replay_begins_with_the_newest_checkpoint_before(exact: Path, step: str) -> None:
    """Also in the middle of an epoch (6), and where an epoch's scheduler has yet to step (12)."""
    run = runs.read(exact)
    first, last = steps_of(step, run)
    plan = plan_of(run, first, last, device="cpu")
    assert plan.begin == max(c.step for c in run.checkpoints if c.step < first)
    assert plan.count == last - plan.begin
    assert plan.seconds > 0
    assert list(plan.warnings) == []
    for computed in compute(plan, Detail(first=first, last=last)).steps:
        loss = compare(plan, computed)
        assert loss is not None
        assert loss.same


def test_another_order_of_additions_is_within_rounding(tmp_path: Path) -> None:
    path = trained(tmp_path / "run", workers=2, exact=False)
    run = runs.read(path)
    plan = plan_of(run, 1, STEPS, workers=1, device="cpu")
    steps = compute(plan, Detail(first=STEPS, last=STEPS)).steps
    losses = [compare(plan, step) for step in steps]
    assert all(loss is not None and loss.reproduced for loss in losses)
    assert plan.tolerance(1) == 1e-5


def test_the_recorded_number_of_threads_is_used(exact: Path) -> None:
    path = exact
    run = runs.read(path)
    assert plan_of(run, 7, 7).settings.threads == int(run.start["machine"]["threads"])


# -- what a step is made of ----------------------------------------------------------------------


def test_the_micro_batches_of_a_step(exact: Path) -> None:
    run = runs.read(exact)
    (step,) = replayed(exact, "8")
    assert [one.slot for one in step.micro_batches] == [0, 1, 2, 3]
    assert [one.samples for one in step.micro_batches] == [4, 4, 4, 4]
    weights = [one.weight for one in step.micro_batches]
    losses = [one.loss for one in step.micro_batches]
    mean = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert mean == pytest.approx(step.loss)
    record = run.step(8)
    assert record is not None
    ranks = list(ranks_by_slot(run, step).values())
    assert [ranks.count(rank) for rank in range(3)] == [n // 4 for n in record.samples_by_rank]
    assert ranks == sorted(ranks)
    assert step.gradient_norm > step.clipped_norm == pytest.approx(0.1, rel=1e-4)


def test_a_short_step_leaves_slots_out(exact: Path) -> None:
    (step,) = replayed(exact, "9")  # 44 samples are two steps of 16 and one of 12
    assert [one.samples for one in step.micro_batches] == [4, 4, 4]
    assert ranks_by_slot(runs.read(exact), step) == {0: 0, 1: 0, 2: 1}


def test_the_largest_updates_are_those_between_two_checkpoints(tmp_path: Path) -> None:
    command(
        "train", str(TASK), run=tmp_path / "run", workers=1, device="cpu", steps=5, exact=True,
        checkpoint_every=1, keep="all", log="csv",
    )  # fmt: skip
    (step,) = replayed(tmp_path / "run", "5")
    folders = [tmp_path / "run" / "checkpoints" / f"step-000000{n}" for n in (4, 5)]
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    relative = {
        name: float((after[name] - before[name]).norm() / before[name].norm())
        for name in after
        if before[name].norm() > 0
    }
    for update in step.updates:
        assert update.relative == pytest.approx(relative[update.name], rel=1e-5)
    assert len(step.updates) == 4, "the model has no more parameters"
    assert step.updates[0].relative == pytest.approx(max(relative.values()), rel=1e-5)


# -- samples -------------------------------------------------------------------------------------


def test_the_sample_with_a_wrong_scale_is_named(exact: Path) -> None:
    for workers in (1, 2):
        (step,) = replayed(exact, "worst", workers, samples=1)
        sample = step.samples[0]
        assert sample.index == spiky.BAD
        assert sample.description == f"class {int(spiky.Samples(spiky.BAD).y[spiky.BAD])}"
        assert len(step.samples) == 1
        assert sample.share > 0.9
        assert not step.notes


def test_the_shares_of_all_samples_add_up(exact: Path) -> None:
    (step,) = replayed(exact, "8", samples=16)
    assert len({sample.index for sample in step.samples}) == 16
    assert sum(sample.share for sample in step.samples) == pytest.approx(1, rel=1e-4)
    losses = [sample.loss for sample in step.samples]
    assert losses == sorted(losses, reverse=True)
    assert sum(losses) / 16 == pytest.approx(step.loss)


def test_rows_that_are_coupled_are_said(tmp_path: Path) -> None:
    path = trained(tmp_path / "run", workers=1, set=["norm=true"], steps=8)
    (step,) = replayed(path, "8", samples=16)
    assert sum(sample.share for sample in step.samples) == pytest.approx(1, rel=1e-4)
    assert len(step.notes) == 1
    assert "BatchNorm1d" in step.notes[0]
    again = replayed(path, "7:8")  # what the samples were asked has left no trace
    assert again[-1].loss == step.loss


def test_a_row_of_a_batch() -> None:
    x = torch.arange(6).reshape(3, 2)
    batch = {"x": x, "names": ["a", "b", "c"], "pair": (x, torch.tensor(1.0)), "scale": 2}
    row = row_of(batch, 1, 3)
    assert row["names"] == ["b"]
    assert row["scale"] == 2
    assert torch.equal(row["x"], x[1:2])
    assert torch.equal(row["pair"][0], x[1:2])
    assert row["pair"][1].ndim == 0


# -- files and the debugger ----------------------------------------------------------------------


def test_the_written_micro_batch_gives_the_same_gradient(exact: Path, tmp_path: Path) -> None:
    command("replay", str(exact), step=8, slot=2, to=tmp_path / "out", device="cpu")
    facts = json.loads((tmp_path / "out" / "step.json").read_text())
    assert (facts["step"], facts["slot"], facts["weight"]) == (8, 2, 4)
    ended = subprocess.run(
        [sys.executable, tmp_path / "out" / "load.py"], capture_output=True, text=True, check=True
    )
    loss, *gradients = ended.stdout.splitlines()
    _, again, _, recorded = loss.split()
    assert float(again) == pytest.approx(float(recorded), rel=1e-6)
    assert len(gradients) == len(load_file(tmp_path / "out" / "gradient.safetensors"))
    assert all(float(line.split()[-1]) < 1e-6 for line in gradients)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("forward", marks=pytest.mark.rest),
        "backward",
        pytest.param("step", marks=pytest.mark.rest),
    ],
)
def test_the_debugger_opens_where_it_is_asked_to(exact: Path, point: str) -> None:
    seen = "type(model).__name__" if point == "step" else "len(batch[0])"
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "lockstep",
            "replay",
            exact,
            "--step=8",
            "--slot=1",
            f"--break={point}",
        ],
        input=f"p {seen}, 'seen'\nc\n",
        capture_output=True,
        text=True,
        check=True,
    )
    value = "'Sequential'" if point == "step" else "4"
    assert f"({value}, 'seen')" in ended.stdout
    assert "step 8, epoch 3: loss" in ended.stdout


def test_a_slot_that_the_step_does_not_have(exact: Path, tmp_path: Path) -> None:
    plan = plan_of(runs.read(exact), 9, 9, device="cpu")
    with refused("slot-not-there", slot=3, last=2):
        compute(plan, Detail(first=9, last=9, slot=3, folder=tmp_path))


# -- steps that cannot be reproduced -------------------------------------------------------------


def test_steps_that_were_left_out_are_counted(exact: Path) -> None:
    run = runs.read(exact)
    assert in_words(run, 2, 9) == "steps 2 to 9"
    fewer = replace(run, steps=[record for record in run.steps if record.step not in (4, 5, 12)])
    assert in_words(fewer, 2, 9) == "steps 2 to 9 (2 were left out)"


def test_the_step_after_a_flipped_bit_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(spiky.FLIP, "9")
    path = trained(tmp_path / "run", workers=1)
    monkeypatch.delenv(spiky.FLIP)
    run = runs.read(path)
    lines: list[str] = []
    result = first_irreproducible(run, 1, STEPS, device="cpu", say=lines.append)
    assert result is not None
    assert result.step == 10
    assert result.loss is not None
    assert not result.loss.same
    assert lines == ["steps 1 to 6 can be reproduced"]
    later = first_irreproducible(run, 13, STEPS, device="cpu", say=lines.append)
    assert later is None, "from a checkpoint after the flip, the rest is computed as it was"


@pytest.mark.rest  # the same walk as above
def test_weights_that_changed_just_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(spiky.FLIP, "6")  # on_step is called before step 6 is saved
    path = trained(tmp_path / "run", workers=1, steps=12)
    result = first_irreproducible(runs.read(path), 1, 12, device="cpu", say=lambda line: None)
    assert result is not None
    assert (result.step, result.loss) == (6, None)
    assert result.parameter == "0.weight"


def test_a_task_that_was_edited_is_said(exact: Path, tmp_path: Path) -> None:
    task = tmp_path / "my_task.py"
    task.write_text(TASK.read_text())
    command("train", str(task), run=tmp_path / "run", workers=1, device="cpu", exact=True, steps=9,
            checkpoint_every=6, keep="all", log="csv")  # fmt: skip
    task.write_text(TASK.read_text().replace("0.01 * torch.randn(6)", "0.02 * torch.randn(6)"))
    run = runs.read(tmp_path / "run")
    for first in (2, 8):  # without a checkpoint before, and from one
        plan = plan_of(run, first, first, device="cpu")
        assert ["the task has changed" in warning for warning in plan.warnings] == [True]
        assert "my_task.py" in plan.warnings[0]
    result = first_irreproducible(run, 1, 9, device="cpu", say=lambda line: None)
    assert result is not None
    assert result.step == 1
    assert result.plan.warnings


def test_another_machine_is_said(exact: Path, tmp_path: Path) -> None:
    path = shutil.copytree(exact, tmp_path / "copy")
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text.replace(lockstep.__version__, "0.1.0"))
    (warning,) = plan_of(runs.read(path), 7, 7, device="cpu").warnings
    assert f"lockstep was 0.1.0 and is {lockstep.__version__}" in warning


# -- bad input -----------------------------------------------------------------------------------


def test_steps_that_do_not_exist(exact: Path) -> None:
    run = runs.read(exact)
    for text in ("0", str(STEPS + 1), "5:4", f"2:{STEPS + 1}"):
        with refused("step-not-recorded", step=text, last=STEPS):
            steps_of(text, run)
    for text in ("x", "1:", ":2", "-1", "1:2:3"):
        with refused("wrong-value", value=text):
            steps_of(text, run)


def test_steps_that_were_left_out_stay_so(tmp_path: Path) -> None:
    path = trained(tmp_path / "run", workers=2, skip="4:5", steps=8)
    run = runs.read(path)
    with refused("step-left-out", step="5"):
        steps_of("5", run)
    plan = plan_of(run, 1, 8, device="cpu")
    steps = compute(plan, Detail(first=8, last=8)).steps
    assert [step.step for step in steps] == [1, 2, 3, 6, 7, 8]
    losses = [compare(plan, step) for step in steps]
    assert all(loss is not None and loss.same for loss in losses)


def test_a_damaged_checkpoint_is_left_out(exact: Path, tmp_path: Path) -> None:
    path = shutil.copytree(exact, tmp_path / "copy")
    run = runs.read(path)
    newest = [c.step for c in run.checkpoints if c.step < STEPS]
    file = path / "checkpoints" / f"step-{newest[-1]:07d}" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    plan = plan_of(run, STEPS, STEPS, device="cpu")
    assert plan.begin == newest[-2]
    assert len(plan.warnings) == 1
    assert newest[-1] != plan.begin
    computed = compute(plan, Detail(first=STEPS, last=STEPS)).steps[-1]
    loss = compare(plan, computed)
    assert loss is not None
    assert loss.same


def test_a_data_set_of_another_length(tmp_path: Path) -> None:
    task = tmp_path / "my_task.py"
    task.write_text(TASK.read_text())
    command("train", str(task), run=tmp_path / "run", workers=1, device="cpu", exact=True, steps=9,
            checkpoint_every=6, keep="all", log="csv")  # fmt: skip
    task.write_text(TASK.read_text().replace("SAMPLES = 44", "SAMPLES = 40"))
    plan = plan_of(runs.read(tmp_path / "run"), 8, 8, device="cpu")
    with refused("replay-of-another-task", step=6):
        compute(plan, Detail(first=8, last=8))


def test_local_steps_are_replayed_at_their_own_size(tmp_path: Path) -> None:
    path = trained(tmp_path / "run", workers=2, exact=False, sync_every=2, steps=8)
    run = runs.read(path)
    with refused("replay-at-own-size", workers=2):
        plan_of(run, 7, 7, workers=1, device="cpu")
    plan = plan_of(run, 1, 8, device="cpu")
    assert plan.settings.workers == 2
    losses = [compare(plan, step) for step in compute(plan, Detail(first=8, last=8)).steps]
    assert all(loss is not None and loss.reproduced for loss in losses)


def test_runs_that_cannot_be_replayed(exact: Path, tmp_path: Path) -> None:
    def run_of(name: str, settings: Settings) -> runs.Run:
        path = tmp_path / name
        path.mkdir()
        settings.write(path)
        shutil.copy(exact / "metrics.jsonl", path)
        return runs.read(path)

    script = run_of("script", Settings.of_script("train.py", 2))
    with refused("replay-of-a-script"):
        plan_of(script, 1, 1)
    server = run_of("server", Settings(task="digits", workers=2, update="server"))
    with refused("replay-of-a-server"):
        plan_of(server, 1, 1)
    mesh = run_of("mesh", Settings(task="digits", workers=2, mesh="tensor=2"))  # type: ignore[arg-type]
    with refused("replay-of-a-mesh"):
        plan_of(mesh, 1, 1)
    empty = run_of("empty", Settings(task="digits"))
    (empty.path / "metrics.jsonl").write_text("")
    with refused("no-step-recorded"):
        steps_of("last", runs.read(empty.path))
