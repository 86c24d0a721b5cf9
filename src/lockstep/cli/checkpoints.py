"""`lockstep checkpoints`: what lies in a run directory, whether it is whole, how two of them
differ, and the model alone.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.arguments import JsonFile, existing_run
from lockstep.errors import DamagedCheckpoint, ExitCode, LockstepError, UsageError

_TORCH = (".pt", ".pth")

app = typer.Typer(help="Look at the checkpoints of a run.", no_args_is_help=True)

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run directory, or a folder of checkpoints; latest: the newest run under runs/.",
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step",
        metavar="N",
        help="The checkpoint of that step; default: the newest.",
    ),
]


@app.command("ls")
def ls(run: Run, json_file: JsonFile = None) -> None:
    """Each checkpoint: its step, size, age, metrics, and which is the best. Nothing is checked;
    `verify` does.
    """
    from lockstep.checkpoints.folders import best_name
    from lockstep.tools.timing.output_files import table, write_json

    directory = _directory(run)
    best = best_name(directory)
    rows = [_row(folder, best=folder.name == best) for folder in _every(directory)]
    shown = [
        [
            row["name"],
            f"{row['bytes'] / 2**20:.2f} MiB",
            row["written"],
            ", ".join(f"{name} {float(value):.4f}" for name, value in row["metrics"].items()),
            "best" if row["best"] else "",
        ]
        for row in rows
    ]
    print(table([""] * 5, shown, left=(0, 2, 3, 4)))
    write_json(json_file, rows)


@app.command("verify")
def verify(run: Run) -> None:
    """Compare every byte of every checkpoint with its manifest. Exit code 1 where one is
    damaged.
    """
    from lockstep.checkpoints import files

    damaged = 0
    for folder in _every(_directory(run)):
        try:
            found = files.read(folder)
        except DamagedCheckpoint as error:
            damaged += 1
            print(f"damaged: {error}")
        else:
            size = (
                f"{len(found.entries)} files,"
                f" {sum(entry.bytes for entry in found.entries) / 2**20:.2f} MiB"
            )
            compared = (
                "not compared" if found.compared is None else f"compared at step {found.compared}"
            )
            if found.witnessed is not None:
                compared += f", witnessed at step {found.witnessed}"
            print(f"whole: {folder.name} ({size}), replicas {compared}")
    raise typer.Exit(ExitCode.FAILED if damaged else ExitCode.OK)


@app.command("diff")
def diff(
    first: Annotated[
        Path,
        typer.Argument(metavar="A", help="A checkpoint's folder, or a run directory: its newest."),
    ],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> None:
    """Compare two checkpoints' models, tensor by tensor, to the bit. Exit code 1 where they
    differ.
    """
    folders = [_checkpoint(path) for path in (first, second)]
    from lockstep.checkpoints import files
    from lockstep.tools.verify.finished_runs import tensor_differences  # imports torch

    a, b = map(files.read, folders)
    differing = list(tensor_differences(a.tensors, b.tensors, ("A", "B")))
    for sentence in differing:
        print(sentence)
    every = len(a.tensors | b.tensors)
    same = (
        f"{len(differing)} of {every} tensors differ"
        if differing
        else f"{every} tensors are equal to the bit"
    )
    print(f"step {a.step} and step {b.step}: {same}")
    raise typer.Exit(ExitCode.FAILED if differing else ExitCode.OK)


@app.command("export")
def export(
    run: Run,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Where the model goes: a .safetensors file, or .pt or .pth for torch.load.",
        ),
    ],
    step: Step = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the best metric.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="The average of the weights (EMA, SWA).")
    ] = False,
) -> None:
    """Copy a whole checkpoint's model to a file of its own, with plain names: safetensors, or a
    dict of tensors that torch.load reads.
    """
    if out.suffix not in (".safetensors", *_TORCH):
        raise UsageError(
            "wrong-ending", option="--out", file=out, endings=[".safetensors", *_TORCH]
        )
    if best and step is not None:
        raise UsageError(
            "options-exclude-each-other",
            one="--best",
            other=f"--step {step}",
            reason="each names a checkpoint",
        )
    directory = _directory(run)
    folder = _checkpoint(directory, step=step, best=best)
    import torch

    from lockstep.checkpoints import files
    from lockstep.checkpoints.manifest import AVERAGE, MODEL
    from lockstep.checkpoints.pieces import TensorFile, TensorPiece, image, read_all, write

    found = files.read(folder)
    if average and not found.averaged:
        raise UsageError("no-average-in-checkpoint", checkpoint=str(folder))
    what, tensors = ("average", found.average) if average else ("model", found.model)
    try:
        if out.suffix in _TORCH:
            torch.save(read_all(tensors(every_name=True)), out)
        elif found.in_parts:
            whole = [TensorPiece(name, tensor) for name, tensor in found.tensors.items()]
            write(out, image(TensorFile(out.name, whole)))
        else:
            shutil.copyfile(folder / (AVERAGE if average else MODEL), out)
    except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
        if isinstance(error, LockstepError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError("cannot-write", name="--out", file=out, reason=reason) from None
    print(f"{out}: the {what} of step {found.step}, {out.stat().st_size / 2**20:.2f} MiB")


def _directory(run: Path) -> Path:
    run = existing_run(run)
    inner = run / "checkpoints"
    return inner if inner.is_dir() else run


def _every(directory: Path) -> list[Path]:
    from lockstep.checkpoints.folders import written

    found = written(directory)
    if not found:
        raise UsageError("no-checkpoint", run=directory)
    return found


def _checkpoint(path: Path, *, step: int | None = None, best: bool = False) -> Path:
    from lockstep.checkpoints.folders import best_name, folder_of

    if (path / "manifest.json").exists():
        return path
    directory = _directory(path)
    every = _every(directory)
    if best:
        named = best_name(directory)
        if named is None:
            raise UsageError("no-best-checkpoint", run=directory)
        return directory / named
    if step is None:
        return every[-1]
    folder = folder_of(directory, step)
    if folder not in every:
        raise UsageError(
            "no-such-step", step=step, run=directory, there=[each.name for each in every]
        )
    return folder


def _row(folder: Path, *, best: bool) -> dict[str, Any]:
    try:
        state: Any = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        metrics = dict(state.get("metrics") or {})
    except (OSError, ValueError, AttributeError, TypeError):
        metrics = {}
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
    return {
        "name": folder.name,
        "bytes": size,
        "written": written,
        "metrics": metrics,
        "best": best,
    }
