"""`lockstep new`: skeletons to complete, from the files in templates/."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from lockstep.tools.timing.output_files import writing


class Skeleton(StrEnum):
    """What `lockstep new` writes."""

    sampler = "sampler"
    trainer = "trainer"
    task = "task"


def new(
    kind: Annotated[
        Skeleton, typer.Argument(metavar="KIND", help="What to write: sampler, trainer or task.")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python file to create.")],
) -> None:
    """Write a skeleton of a sampler, a trainer or a task to a new file.

    The skeleton runs with `python FILE` and names the function that is missing. Comments "# write:"
    mark what to write. Once all of it is written, the file checks it and prints what came out.
    """
    template = files("lockstep.cli").joinpath("templates", f"{kind}.py.txt")
    text = template.read_text(encoding="utf-8").replace("FILE", file.name)
    with writing(file, "FILE"), file.open("x", encoding="utf-8") as opened:
        opened.write(text)
    print(f'{file}: complete what is marked "# write:", and run it with `python {file}`')
