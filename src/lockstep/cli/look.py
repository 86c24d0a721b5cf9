"""`lockstep show`: pictures of what really runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(help="Show how things are done, as text.", no_args_is_help=True)


class Split(StrEnum):
    """How a DistributedSampler deals out samples."""

    interleaved = "interleaved"
    blocks = "blocks"


@app.callback()
def _group() -> None:
    """Keeps `data` a command of its own while it is the only one."""


@app.command("data")
def data(
    samples: Annotated[int, typer.Option(help="Samples in the dataset.")] = 10,
    workers: Annotated[int, typer.Option(help="Ranks.")] = 4,
    split: Annotated[Split, typer.Option(help="Who gets which: every W-th sample, or one block each.")] = Split.interleaved,
    drop_last: Annotated[bool, typer.Option("--drop-last", help="Drop the tail instead of repeating samples.")] = False,
    epochs: Annotated[int, typer.Option(help="Epochs to show.")] = 1,
    shuffle: Annotated[bool, typer.Option(help="Shuffle, anew in each epoch.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
) -> None:
    """Print each rank's positions, and whether counts are equal, ranks overlap, and every sample is there."""
    from lockstep.data import picture

    print(picture.show(samples, workers, split=split.value, drop_last=drop_last, epochs=epochs, shuffle=shuffle, seed=seed))
