"""lockstep.Checkpoints: a training that was stopped goes on to the bits of one that was not, at
another number of ranks, from whole checkpoints only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoints import files, folders, manifest, pieces
from lockstep.checkpoints.saver import steps_until_next
from lockstep.checks.identity import sha256, weights
from lockstep.errors import DamagedCheckpoint, LockstepError, LockstepWarning, UsageError
from lockstep.runtime.failure_record import DIRECTORY
from tests import zoo
from tests.checkpoints.model_alone import write_model
from tests.refused import refused
from tests.teams import on_team


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(96, 10),
    ).to(memory_format=torch.channels_last)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(80, 1, 6, 6, generator=generator),
        torch.randint(0, 10, (80,), generator=generator),
    )


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.0}, {"params": p[2:]}], lr=1e-2, fused=True
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


class Stopped(Exception):
    pass


class Run:
    """A training of 15 steps over three epochs."""

    def __init__(
        self,
        world: lockstep.World,
        folder: Path,
        optimizer: str = "adamw",
        update: str = "replicated",
        exact: bool = False,
        every: int | None = 4,
        keep: int = 3,
        **options: Any,
    ) -> None:
        self.model = net()
        made = OPTIMIZERS[optimizer](list(self.model.parameters()))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(made, [3, 9], gamma=0.5)
        self.stepper = lockstep.Stepper(
            self.model, made, clip=0.5, scheduler=scheduler, exact=exact, update=update, world=world
        )
        self.loader = lockstep.Loader(images(), global_batch=16, micro_batch=2, seed=3)
        self.checkpoints = lockstep.Checkpoints(
            folder, self.stepper, self.loader, every=every, keep=keep, **options
        )

    def train(self, stop: int | None = None) -> list[float]:
        """The losses of the steps, up to step `stop`."""
        losses = []
        with suppress(Stopped), closing(self.checkpoints):
            for window in (window for epoch in self.loader.epochs(3) for window in epoch):
                for x, y in self.stepper.micro_batches(window):
                    out = self.model(x.to(memory_format=torch.channels_last))
                    self.stepper.backward(F.cross_entropy(out, y, reduction="sum"), weight=len(y))
                losses.append(self.stepper.step().loss)
                self.checkpoints.step({"note": self.stepper.steps})
                if self.stepper.steps == stop:
                    raise Stopped  # close() saves nothing then, as if it were killed
        return losses

    def weights(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


def part(
    world: lockstep.World, folder: Path, stop: int | None, **options: Any
) -> tuple[int, list[float], list[Tensor]]:
    """From which step it goes on, its losses and the weights after them."""
    update = "sharded" if world.size in (2, 3) else "replicated"
    run = Run(world, folder, update=update, exact=True, every=3, **options)
    checkpoint = run.checkpoints.resume()
    assert checkpoint is None or checkpoint.state["note"] == checkpoint.step
    step = 0 if checkpoint is None else checkpoint.step
    return step, run.train(stop), run.weights()


def test_a_stopped_training_goes_on_to_the_same_bits_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Each part is stopped a step after its save, which is lost."""
    [(_, losses, weights)] = on_team(part, 1, (tmp_path / "undisturbed", None))
    for number, size in enumerate((1, 4, 3, 2, 1)):
        stop = 3 * number + 4 if number < 4 else None
        for step, again, ours in on_team(part, size, (tmp_path / "stopped", stop)):
            assert step == 3 * number
            assert again == losses[step:stop]
            assert stop is not None or all(map(torch.equal, ours, weights))


def stopped(world: lockstep.World, folder: Path, stop: int, **options: Any) -> None:
    Run(world, folder, **options).train(stop)


def tied(world: lockstep.World, folder: Path, resume: bool) -> tuple[str, dict[str, Tensor]]:
    model = zoo.build("awkward")
    stepper = lockstep.Stepper(
        model, torch.optim.Adam(model.parameters(), lr=1e-2), unused="zeros", world=world
    )
    checkpoints = lockstep.Checkpoints(folder, stepper)
    if resume:
        with torch.no_grad():
            model.inner.weight.zero_()
        checkpoints.resume()
    else:
        for x, y in stepper.micro_batches([zoo.samples(8)]):
            stepper.backward(zoo.loss_sum(model(x), y), weight=len(y))
        stepper.step()
        checkpoints.save()
    checkpoints.close()
    assert model.tied.weight is model.inner.weight
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return sha256(weights(model)), state


def test_a_tied_weight_is_in_the_file_under_each_of_its_names(tmp_path: Path) -> None:
    digest, state = on_team(tied, 2, args=(tmp_path, False))[0]
    found, _ = files.newest_whole(tmp_path)
    assert found is not None
    other = zoo.Awkward()
    other.load_state_dict(load_file(found.folder / files.MODEL))  # strict
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert sha256(found.tensors) == digest
    assert "tied.weight" not in found.tensors
    assert on_team(tied, 2, args=(tmp_path, True))[1][0] == digest
    # as it was written before
    older = write_model(tmp_path / "older", found.step, found.tensors, found.state)
    assert "tied.weight" not in load_file(older / files.MODEL)
    for part in found.folder.glob("optimizer-*"):
        shutil.copy(part, older)
    written = [path for path in sorted(older.iterdir()) if not path.name.startswith("manifest")]
    manifest.seal(older, found.step, [manifest.measured(path) for path in written])
    assert on_team(tied, 2, args=(tmp_path / "older", True))[1][0] == digest


def test_the_folder_is_plain(tmp_path: Path) -> None:
    on_team(stopped, 2, args=(tmp_path, 8))
    folder = tmp_path / "step-0000008"
    parts = {"model.safetensors", "state.json", "manifest.json", "manifest.sha256"}
    assert {path.name for path in folder.iterdir()} >= parts
    model = net()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    names = [name for path in folder.glob("optimizer-*") for name in load_file(path)]
    kept = itertools.product(("exp_avg", "exp_avg_sq", "step"), dict(model.named_parameters()))
    assert sorted(names) == sorted(map("/".join, kept))
    assert len(list(folder.glob("optimizer-*"))) == 2, "both ranks write"
    digest = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert (folder / "manifest.sha256").read_text() == f"{digest}  manifest.json\n"  # sha256sum -c


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("two")
    with lockstep.init() as world:
        stopped(world, folder, 8)
    return folder


def test_every_flipped_bit_truncation_and_missing_file_is_seen(two: Path, tmp_path: Path) -> None:
    dice = random.Random(0)
    source = two / "step-0000008"
    for trial in range(300):
        folder = tmp_path / "step-0000008"
        shutil.copytree(source, folder)
        file = dice.choice(sorted(folder.iterdir()))
        octets = bytearray(file.read_bytes())
        kind = ("flip", "cut", "remove")[trial % 10 if trial % 10 < 3 else 0]
        if kind == "flip":
            octets[dice.randrange(len(octets))] ^= 1 << dice.randrange(8)
            file.write_bytes(octets)
        elif kind == "cut":
            file.write_bytes(octets[: dice.randrange(len(octets))])
        else:
            file.unlink()
        with pytest.raises(DamagedCheckpoint) as caught:
            files.read(folder)
        assert caught.value.file in (file.name, "manifest.json")
        shutil.rmtree(folder)


def chosen(
    world: lockstep.World, folder: Path, until: int | None = None, **options: Any
) -> tuple[int | None, list[str]]:
    """Which step is gone on from, and what was warned of."""
    run = Run(world, folder, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = run.checkpoints.resume(until)
    run.checkpoints.close()
    ours = [warning for warning in caught if issubclass(warning.category, LockstepWarning)]
    step = None if checkpoint is None else checkpoint.step
    return step, [str(warning.message) for warning in ours]


# -- a step of long ago --------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, int]:
    """When each file and folder was changed last."""
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def seen_again(world: lockstep.World, folder: Path) -> list[tuple[int, list[float]]]:
    """From which step each look begins, and the losses from there to the end."""
    looks = []
    for until in (4, 9, 14, 99):
        run = Run(world, folder, exact=True, every=1, read_only=True)
        checkpoint = run.checkpoints.resume(until)
        assert checkpoint is not None
        looks.append((checkpoint.step, run.train()))
        assert not run.checkpoints.step()
        run.checkpoints.save()
    return looks


def test_a_look_at_an_earlier_step_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    [(_, losses, _)] = on_team(part, 1, (tmp_path, None), {"keep": 9})
    leftover = tmp_path / ".step-0000018.1.unfinished"
    leftover.mkdir()
    before = tree(tmp_path)
    for looks in on_team(seen_again, 2, (tmp_path,)):
        assert [step for step, _ in looks] == [3, 9, 12, 15]
        for step, again in looks:
            assert again == losses[step:]
    assert tree(tmp_path) == before


def test_before_the_first_checkpoint_there_is_none(two: Path) -> None:
    assert on_team(chosen, 2, (two, 3)) == [(None, [])] * 2
    with lockstep.init() as world:
        with refused("wrong-value", name="step", value=-1):
            Run(world, two).checkpoints.resume(-1)
        with refused("wrong-value", name="remote"):
            Run(world, two, read_only=True, remote="memory://here")


def test_a_look_takes_the_next_older_one_where_one_is_damaged(two: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two, tmp_path / "copy"))
    (folder / "step-0000008" / "state.json").unlink()
    step, [said] = on_team(chosen, 2, (folder, 11), {"read_only": True})[0]
    assert (step, "falling back to step-0000004 (4 steps lost)" in said) == (4, True)


def corrupted_look(world: lockstep.World, folder: Path) -> str:
    """A look in which the replicas part: it sets nothing aside."""
    run = Run(world, folder, read_only=True)
    run.checkpoints.resume(4)
    if world.rank:
        with torch.no_grad():
            next(run.model.parameters()).add_(1)
    with pytest.raises(LockstepError) as caught:
        run.stepper.check_replicas()
    return str(caught.value.code)


def test_a_look_sets_nothing_aside(two: Path) -> None:
    before = tree(two)
    assert on_team(corrupted_look, 2, (two,)) == ["replicas-differ"] * 2
    assert tree(two) == before


# -- a save that does not come to its end --------------------------------------------------------


def save_and_die(run: Run, folder: Path, countdown: int) -> None:
    """The process is killed as it changes something on the disk for the `countdown`th time."""
    left = itertools.count(countdown - 1, -1)

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    checkpoints = lockstep.Checkpoints(folder, run.stepper, run.loader, keep=2)
    for name in ("fsync", "rename", "replace", "mkdir", "open", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))
    pieces.write = dying(pieces.write)
    files.write_whole = manifest.write_whole = dying(manifest.write_whole)  # type: ignore[attr-defined]
    run.stepper.steps = 15
    checkpoints.save()
    checkpoints.close()


def killed_at_every_write(
    world: lockstep.World, source: Path, scratch: Path
) -> list[tuple[int, int, int]]:
    """How it ended, the newest whole checkpoint and the number of damaged ones, of each process."""
    run = Run(world, scratch / "run")
    outcomes = []
    for countdown in itertools.count(1):
        folder = Path(shutil.copytree(source, scratch / str(countdown)))
        child = os.fork()
        if child == 0:
            try:
                save_and_die(run, folder, countdown)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        newest, damaged = files.newest_whole(folder)
        assert newest is not None
        outcomes.append((code, newest.step, len(damaged)))
        if code != -signal.SIGKILL:
            break
    run.checkpoints.close()
    return outcomes


def test_a_kill_at_every_write_leaves_a_whole_checkpoint(two: Path, tmp_path: Path) -> None:
    """Step 8 is there, step 15 is being saved, and step 4 removed: 15 is found whole or not at
    all.
    """
    [outcomes] = on_team(killed_at_every_write, 1, args=(two, tmp_path))
    codes, steps, damaged = zip(*outcomes, strict=True)
    assert codes == (*[-signal.SIGKILL] * (len(codes) - 1), 0)
    assert set(damaged) == {0}, "nothing half written is under a checkpoint's name"
    assert set(steps) == {8, 15}
    assert list(steps) == sorted(steps)
    assert len(steps) > 10


def disk_refuses(world: lockstep.World, folder: Path, cause: str) -> tuple[str, list[str], int]:
    """What is said, which checkpoints there are and which of them is resumed after the next save."""
    run = Run(world, folder)
    run.train(4)
    run.checkpoints = lockstep.Checkpoints(folder, run.stepper, run.loader)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    usage = shutil.disk_usage
    with pytest.MonkeyPatch.context() as patch:
        if cause == "no room":
            patch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
        elif world.rank == 1:
            patch.setattr(pieces, "write", full)
        run.checkpoints.save()
        with refused("checkpoint-not-written", LockstepError) as caught:
            run.checkpoints.wait()
    run.checkpoints.save()
    run.checkpoints.close()
    checkpoint = run.checkpoints.resume()
    assert checkpoint is not None
    names = sorted(path.name for path in folder.iterdir())
    return caught.value.sentence, names, checkpoint.step


def test_a_disk_that_takes_nothing_is_one_error_on_all_and_the_old_checkpoint_stays(
    tmp_path: Path,
) -> None:
    for cause, said in (
        ("full", " on rank 1 could not be written: [Errno 28] No space left on device"),
        ("no room", "1000 bytes are free on the disk of "),
    ):
        first, *others = on_team(disk_refuses, 3, args=(tmp_path / cause, cause))
        assert others == [first] * 2
        message, names, step = first
        assert "step-0000004" in message
        assert said in message
        assert (names, step) == (["step-0000004"], 4)


# -- another training ----------------------------------------------------------------------------


def other(world: lockstep.World, folder: Path) -> str:
    """What is said of another model."""
    linear = nn.Linear(3, 3)
    stepper = lockstep.Stepper(linear, torch.optim.AdamW(linear.parameters()), world=world)
    with refused("another-training") as caught:
        Run(world, folder, optimizer="sgd").checkpoints.resume()
    with refused("checkpoint-of-another-model"):
        lockstep.Checkpoints(folder, stepper, Run(world, folder).loader).resume()
    return str(caught.value)


def test_another_trainings_checkpoint_is_refused_with_the_difference(two: Path) -> None:
    for said in on_team(other, 2, args=(two,)):
        assert "it has torch.optim.adamw.AdamW, and this training has torch.optim.sgd" in said


def test_nothing_there_is_no_error_and_a_model_alone_is_no_training(tmp_path: Path) -> None:
    write_model(tmp_path, 3, net().state_dict(), {})
    with lockstep.init() as world:
        assert Run(world, tmp_path / "nowhere").checkpoints.resume() is None
        with refused("checkpoint-of-a-model-only", folder=str(tmp_path / "step-0000003")):
            Run(world, tmp_path).checkpoints.resume()


def test_the_launcher_learns_of_checkpoints_from_which_a_restart_would_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marks(case: str, stop: int, *, resumes: bool = True) -> list[str]:
        records = tmp_path / case
        records.mkdir()
        monkeypatch.setenv(DIRECTORY, str(records))
        with lockstep.init() as world:
            run = Run(world, tmp_path / "run")
            if resumes:
                run.checkpoints.resume()
            run.train(stop)
        return sorted(mark.name for mark in records.iterdir())

    assert marks("none yet", 2) == []
    assert marks("saved", 5) == ["rank-0.saved"]
    assert marks("resumed", 6) == ["rank-0.resumed"]
    assert marks("never resumes", 5, resumes=False) == []


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for name, value in (("every", 0), ("keep", 0), ("every", 1.5), ("keep", True)):
        with pytest.raises(UsageError, match=f"{name}="):
            lockstep.Checkpoints(tmp_path, None, **{name: value})  # type: ignore[arg-type]


def test_what_costs_more_is_saved_less_often() -> None:
    assert steps_until_next(0.1, 0.5) == 93  # 46.5 s: sqrt(2 * 0.1 * 3 h)
    assert steps_until_next(100.0, 1.0) == 5000  # 2 % of the time
    assert steps_until_next(0.0, 1.0) == 1


def by_itself(world: lockstep.World, folder: Path) -> list[str]:
    run = Run(world, folder, every=None)
    run.checkpoints._next = 2
    run.train()
    return sorted(path.name for path in folder.iterdir())


def test_without_a_number_all_ranks_save_at_the_same_steps(tmp_path: Path) -> None:
    ranks = on_team(by_itself, 2, args=(tmp_path,))
    assert ranks == [["step-0000002", "step-0000015"]] * 2
    state = json.loads((tmp_path / "step-0000002" / "state.json").read_text())
    assert state["step"] == 2


def closed(
    world: lockstep.World, folder: Path, every: int | None, steps: int, fails: bool
) -> list[int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    checkpoints = lockstep.Checkpoints(folder, stepper, every=every)
    checkpoints.resume()
    with suppress(Stopped), closing(checkpoints):
        for number in range(steps):
            stepper.steps += 1
            checkpoints.step({"said": number})
        if fails:
            raise Stopped
    if not fails:
        checkpoints.close()  # nothing is newer now
    world.barrier()
    return [folders.step_of(path) for path in folders.written(folder)]


@pytest.mark.parametrize("every", [100, None])
def test_close_saves_what_is_newer_than_the_last_save(tmp_path: Path, every: int | None) -> None:
    assert on_team(closed, 2, (tmp_path, every, 44, False))[0][-1] == 44
    assert files.read(folders.folder_of(tmp_path, 44)).state["said"] == 43
    # resumed: nothing is newer
    assert on_team(closed, 1, (tmp_path, every, 0, False))[0][-1] == 44
    # while an exception is handled: the other ranks may not come
    assert on_team(closed, 2, (tmp_path / "failed", 100, 3, True)) == [[], []]


RATES = [0.1, 0.0933, 0.075, 0.05, 0.025, 0.0067]  # of CosineAnnealingLR, by epoch


def stepping_the_scheduler(
    world: lockstep.World, folder: Path, stop: int, where: str
) -> list[float]:
    """Learning rates by epoch, from the first that is not over, until step `stop`; an epoch has 4
    steps. `where` the loop steps its scheduler: at the beginning or at the end of an epoch, or
    in the Stepper.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    itself = where == "stepper"
    by_epoch: Any = {"scheduler": scheduler, "scheduler_per": "epoch"} if itself else {}
    stepper = lockstep.Stepper(model, optimizer, **by_epoch)
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
    loader = lockstep.Loader(data, global_batch=4, micro_batch=2, seed=0)
    loops = None if itself else scheduler
    checkpoints = lockstep.Checkpoints(folder, stepper, loader, scheduler=loops, every=1)
    checkpoints.resume()
    rates = []
    for epoch in loader.epochs(6):
        if where == "beginning" and scheduler.last_epoch < epoch.number:
            scheduler.step()
        for window in epoch:
            for (x,) in stepper.micro_batches(window):
                stepper.backward(model(x).square().sum(), weight=len(x))
            stepper.step()
            checkpoints.step()
            if stepper.steps == stop:
                checkpoints.close()
                return rates
        rates.append(round(optimizer.param_groups[0]["lr"], 4))
        if where == "end":
            scheduler.step()
    checkpoints.close()
    return rates


def test_a_scheduler_that_the_loop_steps_goes_on_where_it_was(tmp_path: Path) -> None:
    # the epoch of the last step is not among the rates
    for stop, where, over in (
        (10, "end", 2),
        (10, "beginning", 2),
        (8, "beginning", 1),
        (10, "stepper", 2),
        (8, "stepper", 1),
    ):
        folder = tmp_path / f"{where} {stop}"
        assert on_team(stepping_the_scheduler, 2, (folder, stop, where))[0] == RATES[:over]
        assert on_team(stepping_the_scheduler, 3, (folder, 0, where)) == [RATES[2:]] * 3


def test_a_step_of_the_scheduler_that_no_checkpoint_has_is_said(tmp_path: Path) -> None:
    """The checkpoint is of the last step of an epoch: the loop would have stepped it next."""
    with lockstep.init() as world:
        stepping_the_scheduler(world, tmp_path, 8, "end")
        with pytest.warns(LockstepWarning, match="one epoch behind") as caught:
            stepping_the_scheduler(world, tmp_path, 0, "end")
    assert len(caught) == 1


def test_a_scheduler_that_no_checkpoint_would_hold_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lockstep.init():
        stepper = lockstep.Stepper(model, optimizer)
        early = lockstep.Checkpoints(tmp_path, stepper)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with refused("scheduler-not-saved"):
            early.save()
        with refused("scheduler-not-saved"):
            lockstep.Checkpoints(tmp_path, stepper)
        kept = lockstep.Checkpoints(tmp_path, stepper, scheduler=scheduler)
        kept.save()
        kept.close()
        other = nn.Linear(4, 1)
        plain = lockstep.Stepper(other, torch.optim.SGD(other.parameters(), lr=0.1))
        with refused("another-training"):
            lockstep.Checkpoints(tmp_path, plain).resume()
