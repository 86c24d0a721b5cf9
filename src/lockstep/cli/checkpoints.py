"""`lockstep checkpoints`: list, verify and compare the checkpoints of a run directory, and export a
checkpoint's model.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.arguments import JsonFile, existing_run
from lockstep.cli.completion import runs
from lockstep.cli.options import GroupedCommand
from lockstep.config.knob import chosen
from lockstep.errors import DamagedCheckpoint, ExitCode, LockstepError, UsageError
from lockstep.runtime.streams import plain

if TYPE_CHECKING:
    from lockstep.checkpoints.files import Checkpoint

_TORCH = (".pt", ".pth")
_FOLDERS = ("hf", "dcp")

app = typer.Typer(no_args_is_help=True)

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        autocompletion=runs,
        help="Run directory, folder of checkpoints, or folder of one checkpoint. latest is the newest"
        " run under runs/.",
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        "--step",
        metavar="N",
        help="Export the checkpoint of step N. Default: the newest.",
    ),
]


@app.command("ls", cls=GroupedCommand)
def ls(run: Run, json_file: JsonFile = None) -> None:
    """List the checkpoints with step, size, age, and metrics.

    The best checkpoint is marked. This does not check the files; `lockstep checkpoints verify` does.
    """
    from lockstep.checkpoints.folders import best_name
    from lockstep.runs import number
    from lockstep.runtime.disk import size_text
    from lockstep.tools.timing.output_files import table, write_json

    folders = _checkpoints(run)
    best = best_name(folders[0].parent)
    records = [_record(folder, best=folder.name == best) for folder in folders]
    rows = []
    for record in records:
        size = f"{record['bytes'] / 2**20:.2f} MiB"
        metrics = [f"{name} {number(value):.4f}" for name, value in record["metrics"].items()]
        mark = "best" if record["best"] else ""
        rows.append([record["name"], size, record["written"], ", ".join(metrics), mark])
    total = size_text(sum(record["bytes"] for record in records))
    rows.append(["all", total, "", "", ""])
    print(plain(table([""] * 5, rows, left=(0, 2, 3, 4))))
    write_json(json_file, records)


@app.command("verify", cls=GroupedCommand)
def verify(run: Run) -> None:
    """Compare every byte of every checkpoint with its manifest.

    The exit code is 1 if a checkpoint is damaged.
    """
    from lockstep.checkpoints import files

    damaged = 0
    for folder in _checkpoints(run):
        try:
            checkpoint = files.read(folder)
        except DamagedCheckpoint as error:
            damaged += 1
            print(plain(f"damaged: {error}"))
        else:
            size = sum(entry.bytes for entry in checkpoint.entries)
            replicas = "not compared"
            if checkpoint.compared is not None:
                replicas = f"compared at step {checkpoint.compared}"
            if checkpoint.witnessed is not None:
                replicas += f", witnessed at step {checkpoint.witnessed}"
            line = (
                f"whole: {folder.name} ({len(checkpoint.entries)} files, {size / 2**20:.2f} MiB),"
                f" replicas {replicas}"
            )
            print(plain(line))
    raise typer.Exit(ExitCode.FAILED if damaged else ExitCode.OK)


@app.command("diff", cls=GroupedCommand)
def diff(
    first: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            autocompletion=runs,
            help="Folder of a checkpoint, or a run directory (its newest checkpoint).",
        ),
    ],
    second: Annotated[
        Path,
        typer.Argument(metavar="B", autocompletion=runs, help="The checkpoint to compare with."),
    ],
) -> None:
    """Compare the models of two checkpoints, bit for bit.

    It prints each tensor that differs. The exit code is 1 if one does.
    """
    first = _checkpoint(first)
    second = _checkpoint(second)
    from lockstep.checkpoints import files
    from lockstep.tools.verify.finished_runs import tensor_differences  # imports torch

    a = files.read(first)
    b = files.read(second)
    differing = list(tensor_differences(a.tensors, b.tensors, ("A", "B")))
    for sentence in differing:
        print(plain(sentence))
    count = len(a.tensors | b.tensors)
    verdict = f"{count} tensors are equal to the bit"
    if differing:
        verdict = f"{len(differing)} of {count} tensors differ"
    print(f"step {a.step} and step {b.step}: {verdict}")
    raise typer.Exit(ExitCode.FAILED if differing else ExitCode.OK)


@app.command("export", cls=GroupedCommand)
def export(
    run: Run,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="PATH",
            help="File to write: .safetensors, or .pt or .pth for torch.load. With --format, a new"
            " folder.",
        ),
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Write a folder for another library. hf: the model, for from_pretrained of"
            " transformers. dcp: model and optimizer, for torch.distributed.checkpoint.",
        ),
    ] = None,
    step: Step = None,
    best: Annotated[
        bool, typer.Option("--best", help="Export the checkpoint with the best metric.")
    ] = False,
    average: Annotated[
        bool, typer.Option("--average", help="Export the average of the weights (EMA, SWA).")
    ] = False,
) -> None:
    """Write the model of a checkpoint to a file, or to a folder for another library.

    The names of tensors are those of the model's state_dict.
    """
    if form is not None:
        chosen("--format", form, _FOLDERS)
    elif out.suffix not in (".safetensors", *_TORCH):
        raise UsageError(
            "wrong-ending", option="--out", file=out, endings=[".safetensors", *_TORCH]
        )
    if best and step is not None:
        raise _exclude("--best", f"--step {step}", "each names a checkpoint")
    if average and form == "dcp":
        reason = "a distributed checkpoint holds what training resumes from"
        raise _exclude("--average", "--format dcp", reason)
    folder = _checkpoint(run, step=step, best=best)
    from lockstep.checkpoints import files

    checkpoint = files.read(folder)
    if average and not checkpoint.averaged:
        raise UsageError("no-average-in-checkpoint", checkpoint=str(folder))
    try:
        size = (
            _write_model(checkpoint, out, average)
            if form is None
            else _write_folder(checkpoint, out, form, average)
        )
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError
        if isinstance(error, LockstepError):
            raise
        cause = error.strerror if isinstance(error, OSError) else error
        raise UsageError("cannot-write", name="--out", file=out, reason=cause) from None
    weights = "average" if average else "model"
    print(f"{out}: the {weights} of step {checkpoint.step}, {size / 2**20:.2f} MiB")


def _exclude(one: str, other: str, reason: str) -> UsageError:
    return UsageError("options-exclude-each-other", one=one, other=other, reason=reason)


def _write_model(checkpoint: Checkpoint, out: Path, average: bool) -> int:
    """Write the model as one file, and return its size in bytes."""
    from lockstep.checkpoints.manifest import AVERAGE, MODEL
    from lockstep.checkpoints.pieces import TensorFile, image, read_all, write
    from lockstep.gradients.saved_state import TensorPiece

    if out.suffix in _TORCH:
        import torch

        tensors = checkpoint.average if average else checkpoint.model
        torch.save(read_all(tensors(every_name=True)), out)
    elif checkpoint.in_parts and not average:
        pieces = [TensorPiece(name, tensor) for name, tensor in checkpoint.tensors.items()]
        write(out, image(TensorFile(out.name, pieces)))
    else:
        shutil.copyfile(checkpoint.folder / (AVERAGE if average else MODEL), out)
    return out.stat().st_size


def _write_folder(checkpoint: Checkpoint, out: Path, form: str, average: bool) -> int:
    """Write a folder for another library, and return its size in bytes."""
    from lockstep.checkpoints.files import CONFIG, put_in_place
    from lockstep.checkpoints.manifest import MODEL
    from lockstep.runtime.disk import remove_tree

    config = checkpoint.state.get(CONFIG)
    if out.exists():
        raise UsageError("cannot-write", name="--out", file=out, reason="it exists already")
    if form == "hf" and config is None:
        raise UsageError("no-model-config", checkpoint=checkpoint.folder)
    folder = out.with_name(f".{out.name}.unfinished")
    remove_tree(folder, ignore_errors=True)  # left by an export that was killed
    folder.mkdir()
    try:
        if form == "dcp":
            from lockstep.integrations.dcp import export

            export(checkpoint, folder)
        else:
            _write_model(checkpoint, folder / MODEL, average)
            (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        size = sum(file.stat().st_size for file in folder.iterdir())
        put_in_place(folder, out)
    finally:
        remove_tree(folder, ignore_errors=True)
    return size


def _checkpoint(run: Path, *, step: int | None = None, best: bool = False) -> Path:
    from lockstep.checkpoints.folders import best_name, folder_of

    folders = _checkpoints(run)
    directory = folders[0].parent
    if best:
        name = best_name(directory)
        if name is None or directory / name not in folders:
            raise UsageError("no-best-checkpoint", run=directory)
        return directory / name
    if step is None:
        return folders[-1]
    folder = folder_of(directory, step)
    if folder not in folders:
        names = [folder.name for folder in folders]
        raise UsageError("no-such-step", step=step, run=directory, there=names)
    return folder


def _checkpoints(run: Path) -> list[Path]:
    from lockstep.checkpoints.folders import found

    return found(existing_run(run))


def _record(folder: Path, *, best: bool) -> dict[str, Any]:
    from lockstep.checkpoints.folders import size_of

    try:
        state: Any = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        metrics = dict(state.get("metrics") or {})
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        metrics = {}
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.stat().st_mtime))
    return {
        "name": folder.name,
        "bytes": size_of(folder),
        "written": written,
        "metrics": metrics,
        "best": best,
    }
