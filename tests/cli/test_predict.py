"""`lockstep predict` from the outside: one file, in the order of the data set, the same on any
number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.checkpoints import files, folders
from lockstep.training.inference.apply import fill
from lockstep.training.resolve import resolve
from tests.cli.command import command as given
from tests.cli.test_evaluate import command, trained
from tests.refused import refused
from tests.training import toy


def test_the_same_file_from_one_rank_and_from_three(tmp_path: Path) -> None:
    run = trained(tmp_path)
    for workers, out in (("1", []), ("3", ["--out", "three.npy"])):
        done = command(
            "predict",
            "run_task.py",
            "--run",
            "run",
            "--workers",
            workers,
            "--device",
            "cpu",
            *out,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "run_task: 21 samples, 3 workers, newest checkpoint (step 4) | predictions in"
        " three.npy\n"
    )
    assert (tmp_path / "three.npy").read_bytes() == (run / "predictions.npy").read_bytes()
    rows = np.load(tmp_path / "three.npy")
    assert rows.shape == (toy.HELD_OUT, 3)
    x, _ = toy.data(toy.HELD_OUT, 2)[:]
    model = resolve(str(tmp_path / "run_task.py")).model()
    newest = folders.newest(run / "checkpoints")
    assert newest is not None
    fill(model, files.read(newest).tensors, "", "")
    assert np.allclose(rows, model.eval()(x).detach().numpy(), atol=1e-6)


def test_mistakes_on_the_command_line_start_nothing(tmp_path: Path) -> None:
    with refused("wrong-ending", option="out", file="x.csv", endings=(".npy",)):
        given("predict", "digits", run=tmp_path, out=Path("x.csv"))
    with refused("not-a-run-directory", directory=str(tmp_path)):
        given("predict", "digits", run=tmp_path)
