"""`lockstep show`: pictures computed by the code that a training runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import astuple
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli.arguments import at_least_one, task_of
from lockstep.cli.options import GroupedCommand
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.collectives import Kind
    from lockstep.tools.show.pipeline_picture import Chart

app = typer.Typer(no_args_is_help=True)
Ranks = Annotated[int, typer.Option("--workers", "-n", help="Number of ranks.")]
GlobalBatch = Annotated[int, typer.Option(help="Samples of one optimizer step, over all ranks.")]
DrawnFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.svg", help="Draw a picture into FILE.svg, in place of text."),
]


def _show(
    picture: ModuleType, arguments: Sequence[Any], title: Callable[[], str], out: Path | None
) -> None:
    """Print the picture as text, or draw it into a file."""
    if out is None:
        print(picture.text(*arguments))
    else:
        picture.drawing(*arguments).save(out)
        print(f"{out}: {title()}")


class Split(StrEnum):
    """How a DistributedSampler divides the samples among ranks."""

    interleaved = "interleaved"
    blocks = "blocks"


@app.command("data", cls=GroupedCommand)
def data(
    samples: Annotated[int, typer.Option(help="Samples in the dataset.")] = 10,
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 4,
    split: Annotated[
        Split,
        typer.Option(help="Samples of a rank: interleaved (every W-th), or blocks (one block)."),
    ] = Split.interleaved,
    drop_last: Annotated[
        bool,
        typer.Option(
            "--drop-last",
            help="Drop the last samples if the counts do not divide. Default: repeat some.",
        ),
    ] = False,
    epochs: Annotated[int, typer.Option(help="Epochs to show.")] = 1,
    shuffle: Annotated[bool, typer.Option(help="Shuffle in each epoch.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    out: DrawnFile = None,
) -> None:
    """Show which samples each rank gets, and which are repeated or missing."""
    at_least_one(samples=samples, workers=workers, epochs=epochs)
    from lockstep.tools.show import data_picture as picture  # imports torch

    dealt = picture.deal(
        samples,
        workers,
        split=split.value,
        drop_last=drop_last,
        epochs=epochs,
        shuffle=shuffle,
        seed=seed,
    )
    _show(picture, [dealt], lambda: picture.title(dealt), out)


@app.command("mesh", cls=GroupedCommand)
def mesh(
    mesh: Annotated[
        str,
        typer.Option("--mesh", metavar="AXES", help="Ranks along data, shard, pipeline, tensor."),
    ] = "data=2,pipeline=2",
    nodes: Annotated[
        int, typer.Option(help="Number of nodes. Consecutive ranks share a node.")
    ] = 1,
    task: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="Task whose layers to name."),
    ] = None,
    batch: GlobalBatch = 32,
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Samples of one forward. Default: one micro-batch per replica."),
    ] = None,
    out: DrawnFile = None,
) -> None:
    """Show which layers and which samples each rank of a mesh holds."""
    from lockstep.config.mesh import Mesh
    from lockstep.tools.show import mesh_picture as picture

    grid = Mesh.read(mesh)
    layers = None if task is None else _stages(task, grid.pipeline)
    samples = shares(grid.replicas, batch, micro_batch)
    ranks = picture.places(grid, nodes, samples, layers)
    _show(picture, [ranks, grid, nodes], lambda: picture.title(grid, nodes), out)


def shares(replicas: int, batch: int, micro_batch: int | None) -> list[range]:
    """Return the samples of each replica, as a training divides a batch among them. `micro_batch` is
    None for one micro-batch per replica. Raises UsageError for sizes that cannot be divided.
    """
    at_least_one(batch=batch)
    from lockstep.data.windows import Plan

    size = -(-batch // replicas) if micro_batch is None else micro_batch
    cut = Plan(samples=batch, global_batch=batch, micro_batch=size).cut(0)
    samples = []
    for rank in range(replicas):  # a rank's micro-batches are consecutive
        positions = [cut.positions(slot) for slot in cut.filled(rank, replicas)]
        samples.append(range(positions[0].start, positions[-1].stop) if positions else range(0))
    return samples


def _stages(task: str, stages: int) -> list[list[str]]:
    """Return the names of the layers in every stage of a task's model."""
    path, _ = task_of(task, {})
    from lockstep.model_parallel.layers import layers_of  # imports torch
    from lockstep.model_parallel.split import cut
    from lockstep.training.resolve import resolve

    resolved = resolve(path)
    layers = layers_of(resolved.model(), resolved.parts)
    parts = cut(layers, stages, resolved.parts)
    return [list(layers.names[part.start : part.stop]) for part in parts]


_ALGORITHMS = {
    "ring": "Show an all-reduce along a ring: one round trip adds, a second one copies.",
    "tree": "Show an all-reduce up and down a binomial tree.",
    "recursive-doubling": "Show an all-reduce of whole tensors, at distance 1, 2, 4 and so on.",
    "halving-doubling": "Show an all-reduce of halves, then quarters, and back.",
    "direct": "Show an all-reduce in which each rank adds up one piece and sends it to all.",
    "central": "Show an all-reduce through rank 0: the simplest and slowest.",
    "hierarchical": "Show an all-reduce by trees inside nodes and a ring between them.",
}
_COLLECTIVES = {
    "all-reduce": "Show all-reduce: all ranks get the sum.",
    "reduce": "Show reduce: one rank gets the sum.",
    "reduce-scatter": "Show reduce-scatter: each rank gets a part of the sum.",
    "broadcast": "Show broadcast: all ranks get the tensor of one rank.",
    "all-gather": "Show all-gather: all ranks get all tensors.",
    "gather": "Show gather: one rank gets all tensors.",
    "scatter": "Show scatter: each rank gets one piece of a list.",
    "all-to-all": "Show all-to-all: each rank sends one piece to each rank.",
}


_ROOTED = ("reduce", "broadcast", "gather", "scatter")


def _algorithm(
    context: typer.Context,
    workers: Ranks = 4,
    out: DrawnFile = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of a node, for hierarchical only. Default: 2.")
    ] = None,
) -> None:
    name = str(context.info_name)
    at_least_one(workers=workers, ranks_per_node=ranks_per_node)
    from lockstep.collectives import prove, schedule
    from lockstep.tools.show import schedule_picture as picture

    if ranks_per_node is not None and name != "hierarchical":
        raise _without_effect(name, "--ranks-per-node", "all ranks are alike")
    algorithm = name.replace("-", "_")
    all_reduce = schedule("all_reduce", algorithm, workers, ranks_per_node=ranks_per_node or 2)
    _show(picture, [all_reduce], lambda: picture.title(all_reduce, prove(all_reduce))[0], out)


def _collective(
    context: typer.Context,
    values: Annotated[
        str,
        typer.Option(
            metavar='"1,2;3,4"', help="One row of numbers per rank. A semicolon ends a row."
        ),
    ] = "1,2,3;4,5,6;7,8,9",
    op: Annotated[
        str | None,
        typer.Option(help="Reduction: sum, mean, max, min or prod. Default: sum."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Algorithm, such as ring, tree or central.")
    ] = None,
    root: Annotated[
        int | None,
        typer.Option(help="Rank that sends to all or receives from all. Default: 0."),
    ] = None,
) -> None:
    from lockstep.collectives import REDUCING

    name = str(context.info_name)
    kind: Kind = name.replace("-", "_")  # type: ignore[assignment]  # one of _COLLECTIVES
    if op is not None and kind not in REDUCING:
        raise _without_effect(name, f"--op {op}", "nothing is added up")
    if root is not None and name not in _ROOTED:
        raise _without_effect(name, f"--root {root}", "no rank is special")
    from lockstep.tools.show.before_after import before_and_after  # with torch

    if algorithm is not None:
        algorithm = algorithm.replace("-", "_")
    rows = _rows(values)
    print(before_and_after(kind, rows, op=op or "sum", algorithm=algorithm, root=root or 0))


def _without_effect(name: str, option: str, reason: str) -> UsageError:
    return UsageError("option-without-effect", option=option, name=name, reason=reason)


def _rows(text: str) -> list[list[float]]:
    """Parse "1,2;3,4": a row of numbers for each rank."""
    try:
        rows = [list(map(_number, row.split(","))) for row in text.split(";")]
    except ValueError:
        expected = 'numbers, and split rows by semicolons, such as "1,2,3;4,5,6"'
        raise UsageError("wrong-value", name="values", value=text, expected=expected) from None
    for value in itertools.chain(*rows):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UsageError("integer-too-large", value=value)
    return rows


def _number(text: str) -> float:
    is_float = "." in text or "e" in text or "n" in text  # 1e3, inf, nan
    return float(text) if is_float else int(text)


@app.command("pipeline", cls=GroupedCommand)
def pipeline(
    schedule: Annotated[
        str, typer.Option(help="Order of the work: naive, gpipe or 1f1b.")
    ] = "1f1b",
    stages: Annotated[
        int, typer.Option("--stages", "-n", help="Ranks that hold consecutive layers.")
    ] = 4,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", "-m", help="Micro-batches of one optimizer step.")
    ] = 8,
    backward: Annotated[float, typer.Option(help="Time of a backward, in forwards.")] = 2.0,
    out: DrawnFile = None,
) -> None:
    """Show which rank of a pipeline works on which micro-batch, and how long ranks wait.

    The order is that of a real run.
    """
    at_least_one(stages=stages, micro_batches=micro_batches)
    from lockstep.tools.show import pipeline_picture as picture

    drawn = pipeline_chart(schedule, stages, micro_batches, backward)
    _show(picture, [drawn], lambda: picture.title(drawn)[0], out)


def pipeline_chart(schedule: str, ranks: int, micro_batches: int, backward: float = 2.0) -> Chart:
    """Return the chart of a step, in the order in which a pipeline works. Raises UsageError for
    numbers that the schedule cannot run, or for a `backward` outside its range.
    """
    from lockstep.config import knob
    from lockstep.model_parallel import schedules
    from lockstep.tools.show.pipeline_picture import Chart, placed

    knob.number("backward", backward, above=0, below=1000, unit="forwards")
    length = Fraction(backward).limit_denominator(100)
    orders = schedules.order(schedule, ranks, micro_batches)
    rows = placed([list(map(astuple, row)) for row in orders], length)
    idle = schedules.bubble(schedule, ranks, micro_batches)
    formula = f"{schedules.formula(schedule)} = {idle:.1%}"
    return Chart(schedule, micro_batches, length, rows, formula)


_EACH_ROUND = "Each round lists who sends what to whom, and what each rank then holds."
for _name, _text in _ALGORITHMS.items():
    app.command(_name, cls=GroupedCommand, help=f"{_text}\n\n{_EACH_ROUND}")(_algorithm)
_TABLE = "The table has the tensor of each rank before and after."
for _name, _text in _COLLECTIVES.items():
    app.command(_name, cls=GroupedCommand, help=f"{_text}\n\n{_TABLE}")(_collective)
