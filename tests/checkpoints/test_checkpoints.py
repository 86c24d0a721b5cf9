"""lockstep.Checkpoints: a training that was stopped goes on to the bits of one that was not, at
another number of ranks, from whole checkpoints only.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import warnings
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
from lockstep.checkpoints.identity import sha256, weights
from lockstep.checkpoints.saver import steps_until_next
from lockstep.errors import (
    DamagedCheckpoint,
    LockstepError,
    LockstepWarning,
    UsageError,
    WorkerFailed,
)
from lockstep.testing import run_ranks
from tests import zoo
from tests.checkpoints.model_alone import write_model
from tests.refused import refused


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
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


class Run:
    """A training of 15 steps over three epochs."""

    def __init__(
        self,
        world: lockstep.World,
        folder: str,
        optimizer: str = "adamw",
        update: str = "replicated",
        every: int | None = 4,
    ) -> None:
        self.model = net()
        made = OPTIMIZERS[optimizer](list(self.model.parameters()))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(made, [3, 9], gamma=0.5)
        self.stepper = lockstep.Stepper(
            self.model, made, clip=0.5, scheduler=scheduler, exact=True, update=update, world=world
        )
        self.loader = lockstep.Loader(images(), global_batch=16, micro_batch=2, seed=3)
        self.checkpoints = lockstep.Checkpoints(
            folder, self.stepper, self.loader, every=every, keep=3
        )

    def train(self, stop: int | None = None) -> list[float]:
        losses = []
        for epoch in self.loader.epochs(3):
            for window in epoch:
                for x, y in self.stepper.micro_batches(window):
                    out = self.model(x.to(memory_format=torch.channels_last))
                    self.stepper.backward(F.cross_entropy(out, y, reduction="sum"), weight=len(y))
                losses.append(self.stepper.step().loss)
                self.checkpoints.step({"note": self.stepper.steps})
                if self.stepper.steps == stop:  # as if it were killed: close() would save this step
                    self.checkpoints.wait()
                    return losses
        self.checkpoints.close()
        return losses

    def weights(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]


def whole(world: lockstep.World, folder: str, **options: Any) -> tuple[list[float], list[Tensor]]:
    run = Run(world, folder, **options)
    return run.train(), run.weights()


def stopped(world: lockstep.World, folder: str, stop: int, **options: Any) -> None:
    Run(world, folder, **options).train(stop)


def resumed(
    world: lockstep.World, folder: str, **options: Any
) -> tuple[int, list[float], list[Tensor]]:
    run = Run(world, folder, **options)
    found = run.checkpoints.resume()
    assert found is not None
    assert found.state["note"] == found.step
    return found.step, run.train(), run.weights()


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_a_stopped_training_goes_on_to_the_same_bits_at_any_number_of_ranks(
    tmp_path: Path, optimizer: str
) -> None:
    losses, weights = run_ranks(
        whole, 2, args=(str(tmp_path / "whole"),), kwargs={"optimizer": optimizer}
    )[0]
    update = {1: "replicated", 2: "sharded", 3: "sharded", 4: "replicated"}
    for first, then in ((2, 1), (3, 2), (1, 4), (4, 3)):
        folder = str(tmp_path / f"{first}-{then}")
        run_ranks(
            stopped,
            first,
            args=(folder, 10),
            kwargs={"optimizer": optimizer, "update": update[first]},
        )
        for step, rest, found in run_ranks(
            resumed, then, args=(folder,), kwargs={"optimizer": optimizer, "update": update[then]}
        ):
            assert step == 8
            assert rest == losses[8:]
            assert all(map(torch.equal, found, weights))


def tied(world: lockstep.World, folder: str, resume: bool) -> tuple[str, dict[str, Tensor]]:
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
    return sha256(weights(model)), {
        name: value.clone() for name, value in model.state_dict().items()
    }


def test_a_tied_weight_is_in_the_file_under_each_of_its_names(tmp_path: Path) -> None:
    digest, state = run_ranks(tied, 2, args=(str(tmp_path), False))[0]
    found, _ = files.newest_whole(tmp_path)
    assert found is not None
    other = zoo.Awkward()
    other.load_state_dict(load_file(found.folder / files.MODEL))  # strict
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert sha256(found.tensors) == digest
    assert "tied.weight" not in found.tensors
    assert run_ranks(tied, 2, args=(str(tmp_path), True))[1][0] == digest
    # as it was written before
    older = write_model(tmp_path / "older", found.step, found.tensors, found.state)
    assert "tied.weight" not in load_file(older / files.MODEL)
    for part in found.folder.glob("optimizer-*"):
        shutil.copy(part, older)
    entries = [
        manifest.measured(each)
        for each in sorted(older.iterdir())
        if not each.name.startswith("manifest")
    ]
    manifest.seal(older, found.step, entries)
    assert run_ranks(tied, 2, args=(str(tmp_path / "older"), True))[1][0] == digest


def test_the_folder_is_plain(tmp_path: Path) -> None:
    run_ranks(stopped, 2, args=(str(tmp_path), 8))
    (folder,) = (path for path in tmp_path.iterdir() if path.name == "step-0000008")
    assert {path.name for path in folder.iterdir()} >= {
        "model.safetensors",
        "state.json",
        "manifest.json",
        "manifest.sha256",
    }
    from safetensors.torch import load_file

    model = net()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    names = [name for path in folder.glob("optimizer-*") for name in load_file(path)]
    assert sorted(names) == sorted(
        f"{state}/{name}"
        for state in ("exp_avg", "exp_avg_sq", "step")
        for name, _ in model.named_parameters()
    )
    assert len(list(folder.glob("optimizer-*"))) == 2, "both ranks write"
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--quiet", "manifest.sha256"], cwd=folder, check=True)


def test_only_so_many_are_kept_and_the_best(tmp_path: Path) -> None:
    run_ranks(best_and_more, 2, args=(str(tmp_path),))
    assert [path.name for path in folders.written(tmp_path)] == [
        "step-0000001",
        "step-0000004",
        "step-0000005",
    ]
    assert files.best(tmp_path) == tmp_path / "step-0000001"


def best_and_more(world: lockstep.World, folder: str) -> None:
    run = Run(world, folder)
    run.checkpoints.keep = 2
    for epoch in run.loader.epochs(1):
        for window in epoch:
            for x, y in run.stepper.micro_batches(window):
                run.stepper.backward(
                    F.cross_entropy(run.model(x), y, reduction="sum"), weight=len(y)
                )
            run.stepper.step()
            run.checkpoints.save(best=("accuracy", 0.5) if run.stepper.steps == 1 else None)
    run.checkpoints.close()


# -- damage --------------------------------------------------------------------------------------


def alone(folder: Path, stop: int | None = None, resume: bool = False) -> tuple[int, list[Tensor]]:
    return run_ranks(on_one, 1, args=(str(folder), stop, resume))[0]


def on_one(
    world: lockstep.World, folder: str, stop: int | None, resume: bool
) -> tuple[int, list[Tensor]]:
    run = Run(world, folder)
    found = run.checkpoints.resume() if resume else None
    if stop is not None:
        run.train(stop)
    return -1 if found is None else found.step, run.weights()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("two")
    alone(folder, 8)
    return folder


def test_every_flipped_bit_truncation_and_missing_file_is_seen(two: Path, tmp_path: Path) -> None:
    dice = random.Random(0)
    source = two / "step-0000008"
    for trial in range(1000):
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


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(
    two: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two, folder)
    file = folder / "step-0000008" / "model.safetensors"
    octets = bytearray(file.read_bytes())
    octets[-5] ^= 8
    file.write_bytes(octets)
    assert run_ranks(falls_back, 2, args=(str(folder),)) == [(4, True), (4, False)]
    assert run_ranks(names_it, 1, args=(str(folder),)) == ["step-0000008"]


def falls_back(world: lockstep.World, folder: str) -> tuple[int, bool]:
    run = Run(world, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run.checkpoints.resume()
    assert found is not None
    said = [str(each.message) for each in caught if issubclass(each.category, LockstepWarning)]
    return found.step, said == [
        f"rejected {_changed('step-0000008')}; falling back to step-0000004 (4 steps lost)"
    ]


def _changed(checkpoint: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        "checkpoint-file-changed",
        checkpoint=checkpoint,
        file="model.safetensors",
        difference="its digest is not the one in manifest.json",
    )


def names_it(world: lockstep.World, folder: str) -> str:
    with refused("checkpoint-file-changed", DamagedCheckpoint, file="model.safetensors") as caught:
        Run(world, folder).checkpoints.resume(8)
    return str(caught.value.values["checkpoint"])


def test_a_manifest_that_names_other_files_is_refused(two: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-0000008"
    shutil.copytree(two / "step-0000008", folder)
    for name in ("../../etc/passwd", "/etc/passwd", ".hidden", ""):
        manifest.seal(folder, 8, [manifest.SealedFile(name, 1, "0" * 64)])
        with refused(
            "checkpoint-file-unreadable",
            DamagedCheckpoint,
            reason=f"ValueError: it names a file {name!r} outside its folder",
        ):
            files.read(folder)


# -- a save that does not come to its end --------------------------------------------------------

KILLED = """
import os, pathlib, shutil, sys, traceback
import tests.checkpoints.test_checkpoints as here
import torch._dynamo  # which the first optimizer of a process imports, for seconds
import lockstep
from lockstep.checkpoints import files, folders, manifest, pieces

source, scratch = map(pathlib.Path, sys.argv[1:])


def dying(real):
    def call(*args, **kwargs):
        global countdown
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), 9)
        return real(*args, **kwargs)
    return call


def save(folder):
    with lockstep.init() as world:
        run = here.Run(world, str(folder), every=15)
        run.checkpoints.resume()
        for name in ("fsync", "rename", "replace", "mkdir", "open"):
            setattr(os, name, dying(getattr(os, name)))
        pieces.write = dying(pieces.write)
        files.write_whole = manifest.write_whole = dying(manifest.write_whole)
        run.train()


for countdown in range(1, 60):
    folder = scratch / str(countdown)
    shutil.copytree(source, folder)
    child = os.fork()  # each has torch already
    if child == 0:
        try:
            save(folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found, damaged = files.newest_whole(folder)
    print(code, found.step, len(damaged), flush=True)
    if code != -9:
        break
"""


def test_a_kill_at_every_write_leaves_a_whole_checkpoint(two: Path, tmp_path: Path) -> None:
    """Step 8 is there, step 15 is being saved: it is found whole or not at all. Takes seconds: a
    training for each write.
    """
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(two), str(tmp_path)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
        },
    )
    assert done.returncode == 0, done.stderr
    codes, found, damaged = zip(
        *(map(int, line.split()) for line in done.stdout.splitlines()), strict=True
    )
    assert codes == (*[-9] * (len(codes) - 1), 0), done.stderr
    assert set(damaged) == {0}, "nothing half written is under a checkpoint's name"
    assert set(found) == {8, 15}
    assert list(found) == sorted(found)
    assert len(found) > 10


def full(world: lockstep.World, folder: str) -> tuple[str, list[str], float]:
    """The disk takes nothing more from rank 1."""
    run = Run(world, folder)
    run.train(4)
    run.checkpoints = lockstep.Checkpoints(folder, run.stepper, run.loader, every=4)
    real = pieces.write
    if world.rank == 1:
        pieces.write = lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore[assignment]
    try:
        run.checkpoints.save()
        with refused("checkpoint-not-written", LockstepError, where=" on rank 1") as caught:
            run.checkpoints.wait()
    finally:
        pieces.write = real
    run.checkpoints.save()
    run.checkpoints.close()
    return (
        caught.value.sentence,
        sorted(path.name for path in Path(folder).iterdir()),
        run.checkpoints.resume().step,
    )  # type: ignore[union-attr]


def test_a_full_disk_on_one_rank_is_one_error_on_all_and_the_old_checkpoint_stays(
    tmp_path: Path,
) -> None:
    ranks = run_ranks(full, 3, args=(str(tmp_path),))
    assert len({message for message, *_ in ranks}) == 1
    assert "step-0000004" in ranks[0][0]
    assert ranks[0][0].endswith(": [Errno 28] No space left on device")
    assert ranks[0][1:] == (["step-0000004"], 4)


def no_room(world: lockstep.World, folder: str) -> str:
    run = Run(world, folder)
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: real(path)._replace(free=1000)
    try:
        run.checkpoints.save()
        with refused("checkpoint-not-written", LockstepError) as caught:
            run.checkpoints.wait()
    finally:
        shutil.disk_usage = real
    return str(caught.value)


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    assert "1000 bytes are free on the disk of " in run_ranks(no_room, 2, args=(str(tmp_path),))[0]


# -- another training ----------------------------------------------------------------------------


def other(world: lockstep.World, folder: str) -> list[str]:
    found = []
    for make in (
        lambda: Run(world, folder, optimizer="sgd"),
        lambda: _with(
            Run(world, folder),
            loader=lockstep.Loader(images(), global_batch=16, micro_batch=4, seed=3),
        ),
        lambda: _with(Run(world, folder), model=nn.Sequential(nn.Linear(3, 3))),
    ):
        run = make()
        with pytest.raises(UsageError) as caught:
            run.checkpoints.resume()
        found.append(str(caught.value))
    return found


def _with(run: Run, **changed: Any) -> Run:
    stepper, loader = run.stepper, changed.get("loader", run.loader)
    if "model" in changed:
        model = changed["model"]
        stepper = lockstep.Stepper(
            model, torch.optim.AdamW(model.parameters()), exact=True, world=stepper.world
        )
    run.checkpoints = lockstep.Checkpoints(run.checkpoints.directory, stepper, loader)
    return run


def test_another_trainings_checkpoint_is_refused_with_the_difference(two: Path) -> None:
    for found in run_ranks(other, 2, args=(str(two),)):
        assert (
            "it has torch.optim.adamw.AdamW, and this training has torch.optim.sgd.SGD" in found[0]
        )
        assert "micro_batch was 2 and is 4" in found[1]
        assert "[checkpoint-of-another-model]" in found[2]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    assert alone(tmp_path / "nowhere", resume=True)[0] == -1


def test_a_checkpoint_of_a_model_alone_is_no_training(tmp_path: Path) -> None:
    write_model(tmp_path, 3, net().state_dict(), {})
    with pytest.raises(WorkerFailed, match=r"step-0000003 .*\[checkpoint-of-a-model-only\]"):
        alone(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("name", "value"), [("every", 0), ("keep", 0), ("every", 1.5), ("keep", True)]
)
def test_numbers_that_make_no_sense_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name}="):
        lockstep.Checkpoints(tmp_path, None, **{name: value})  # type: ignore[arg-type]


def test_what_costs_more_is_saved_less_often() -> None:
    assert steps_until_next(0.1, 0.5) == 93  # 46.5 s: sqrt(2 * 0.1 * 3 h)
    assert steps_until_next(100.0, 1.0) == 5000  # 2 % of the time
    assert steps_until_next(0.0, 1.0) == 1


def by_itself(world: lockstep.World, folder: str) -> list[str]:
    run = Run(world, folder, every=None)
    run.checkpoints._next = 2
    run.train()
    return sorted(path.name for path in Path(folder).iterdir())


def test_without_a_number_all_ranks_save_at_the_same_steps(tmp_path: Path) -> None:
    ranks = run_ranks(by_itself, 2, args=(str(tmp_path),))
    assert ranks[0] == ranks[1] == ["step-0000002", "step-0000015"]
    state = json.loads((tmp_path / "step-0000002" / "state.json").read_text())
    assert state["step"] == 2


def closed(
    world: lockstep.World, folder: str, every: int | None, steps: int, fails: bool
) -> list[int]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    stepper = lockstep.Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), world=world)
    checkpoints = lockstep.Checkpoints(folder, stepper, every=every)
    checkpoints.resume()
    try:
        for number in range(steps):
            for x in stepper.micro_batches(
                [
                    torch.randn(
                        4, 3, generator=torch.Generator().manual_seed(10 * number + world.rank)
                    )
                ]
            ):
                stepper.backward(model(x).square().sum(), weight=4)
            stepper.step()
            checkpoints.step({"said": number})
        if fails:
            raise KeyError("on purpose")
    except KeyError:
        checkpoints.close()
    else:
        checkpoints.close()
        checkpoints.close()  # nothing is newer now
    world.barrier()
    return [folders.step_of(each) for each in folders.written(Path(folder))]


@pytest.mark.parametrize("every", [100, None])
def test_close_saves_what_is_newer_than_the_last_save(tmp_path: Path, every: int | None) -> None:
    assert run_ranks(closed, 2, (str(tmp_path), every, 44, False))[0][-1] == 44
    assert files.read(folders.folder_of(tmp_path, 44)).state["said"] == 43
    # resumed: nothing is newer
    assert run_ranks(closed, 1, (str(tmp_path), every, 0, False))[0][-1] == 44


def test_close_saves_nothing_while_an_exception_is_handled(tmp_path: Path) -> None:
    """The other ranks may not come."""
    assert run_ranks(closed, 2, (str(tmp_path), 100, 3, True)) == [[], []]


RATES = [0.1, 0.0933, 0.075, 0.05, 0.025, 0.0067]  # of CosineAnnealingLR, by epoch


def stepping_the_scheduler(
    world: lockstep.World, folder: str, stop: int, where: str
) -> list[float]:
    """Learning rates by epoch, from the first that is not over, until step `stop`; an epoch has 4
    steps. `where` the loop steps its scheduler: at the beginning or at the end of an epoch.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    stepper = lockstep.Stepper(model, optimizer)
    data = TensorDataset(torch.randn(16, 4, generator=torch.Generator().manual_seed(1)))
    loader = lockstep.Loader(data, global_batch=4, micro_batch=2, seed=0)
    checkpoints = lockstep.Checkpoints(folder, stepper, loader, scheduler=scheduler, every=1)
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


@pytest.mark.parametrize(
    ("stop", "where"), [(10, "end"), (10, "beginning"), (8, "beginning")], ids=str
)
def test_a_scheduler_that_the_loop_steps_goes_on_where_it_was(
    tmp_path: Path, stop: int, where: str
) -> None:
    over = 2 if stop == 10 else 1  # the epoch of the last step is not in the list
    assert run_ranks(stepping_the_scheduler, 2, (str(tmp_path), stop, where))[0] == RATES[:over]
    found = run_ranks(stepping_the_scheduler, 3, (str(tmp_path), 0, where))
    assert found == [RATES[2:]] * 3


def test_a_step_of_the_scheduler_that_no_checkpoint_has_is_said(tmp_path: Path) -> None:
    """The checkpoint is of the last step of an epoch: the loop would have stepped it next."""
    with lockstep.init() as world:
        stepping_the_scheduler(world, str(tmp_path), 8, "end")
        with pytest.warns(LockstepWarning, match="one epoch behind") as caught:
            stepping_the_scheduler(world, str(tmp_path), 0, "end")
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
        with refused(
            "another-training",
            differences="it has a scheduler of the loop, and this training has no scheduler of the"
            " loop",
        ):
            lockstep.Checkpoints(tmp_path, plain).resume()
