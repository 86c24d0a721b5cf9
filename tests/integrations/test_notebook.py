"""Functions of a notebook's cells on two ranks, in a real kernel: the example, then cells of the
test. One kernel runs all of them.

A rank that waits for its file goes on when its output has reached the notebook.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from tests.ending import alive

pytestmark = pytest.mark.rest

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
CELLS = {
    "setup": """
import asyncio, os, pathlib, signal, sys, time
import torch, lockstep
__file__ = SCRIPT  # VS Code's interactive window sets it
def wait_for(name):
    while not pathlib.Path(FOLDER, name).exists():
        time.sleep(0.01)
class Counted:
    def __init__(self, rank): self.rank = rank
factor = 10
def train(rows):
    with lockstep.init() as world:
        mine = rows[world.rank] * factor
        total = lockstep.collectives.all_reduce(mine)
        return Counted(world.rank), total
""",
    "a class, a global and tensors": """
found = lockstep.launch(train, 2, (torch.tensor([[1.0, 2.0], [3.0, 5.0]]),))
[isinstance(each, Counted) and each.rank for each, _ in found], [total.tolist() for _, total in found]
""",
    "edited and run again, under await": """
factor = 100
def train(rows):
    with lockstep.init() as world:
        return rows[world.rank].item() + factor
await asyncio.sleep(0)
lockstep.launch(train, 2, (torch.arange(2),))
""",
    "lines": """
def lines():
    with lockstep.init() as world:
        print("both")
        print(f"rank {world.rank} é" + " ü" * 2000)
        wait_for(f"rank {world.rank}")
        print("no end", end="", file=sys.stderr)
lockstep.launch(lines, 2)
""",
    "bars": """
def bars():
    with lockstep.init() as world:
        for share in (25, 50):
            print(f"\\rdone {share} %", end="", file=sys.stderr, flush=True)
        wait_for(f"bar {world.rank}")
        print(f"\\rdone 100 % by {world.rank}", file=sys.stderr, flush=True)
lockstep.launch(bars, 2)
""",
    "fails": """
def fails():
    with lockstep.init() as world:
        if world.rank == 1:
            raise ValueError("boom")  # line of the cell
        signal.pause()
lockstep.launch(fails, 2)
""",
    "interrupted": """
def pauses():
    with lockstep.init() as world:
        print("pid", os.getpid())
        signal.pause()
lockstep.launch(pauses, 2)
""",
    "after it": "lockstep.launch(train, 2, (torch.arange(2),))",
}
SEEN = {
    "[0] rank 0": "rank 0",
    "[1] rank 1": "rank 1",
    "[0] done 50 %": "bar 0",
    "[1] done 50 %": "bar 1",
}
"""What appears in the notebook, and the file that a rank waits for then."""


class Client(NotebookClient):
    """Looks at output as it arrives: a rank waits for it, and two pids are interrupted."""

    def __init__(self, folder: Path, notebook: Any) -> None:
        super().__init__(notebook, timeout=120, allow_errors=True)
        self.folder = folder
        self.pids: list[int] = []
        self.stopping: Any = None

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        content = msg["content"]
        text = str(content.get("text") or content.get("data", {}).get("text/plain", ""))
        for said, file in SEEN.items():
            if said in text:
                (self.folder / file).touch()
        self.pids += [int(line.split()[-1]) for line in text.splitlines() if "] pid " in line]
        if len(self.pids) == 2 and self.stopping is None:
            self.stopping = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)


def ran(folder: Path) -> tuple[list[Any], dict[str, Any], Client]:
    """The outputs of the example's code cells, those of the test's by name, and the client."""
    script = folder / "cells.py"
    script.write_text("raise AssertionError('a rank has run the cells as a script')\n")
    notebook = nbformat.read(EXAMPLE, as_version=4)
    example = [cell for cell in notebook.cells if cell.cell_type == "code"]
    own = {
        name: new_code_cell(
            text.replace("SCRIPT", repr(str(script))).replace("FOLDER", repr(str(folder)))
        )
        for name, text in CELLS.items()
    }
    notebook.cells += own.values()
    client = Client(folder, notebook)
    client.execute()
    return (
        [cell.outputs for cell in example],
        {name: cell.outputs for name, cell in own.items()},
        client,
    )


def value(outputs: Any) -> Any:
    return next(each.data["text/plain"] for each in outputs if each.output_type == "execute_result")


def printed(outputs: Any, name: str) -> str:
    return "".join(each.text for each in outputs if each.get("name") == name)


def failure(outputs: Any) -> Any:
    return next(each for each in outputs if each.output_type == "error")


def test_cells_run_on_ranks_show_their_output_and_stop(tmp_path: Path) -> None:
    example, own, client = ran(tmp_path)
    assert not [each for outputs in example for each in outputs if each.output_type == "error"]
    assert value(example[3]) == "True", "other bits on two ranks than on one"
    assert "[0] global batch 24" in printed(example[3], "stderr")

    # what a cell defines, also when it was edited
    assert value(own["a class, a global and tensors"]) == "([0, 1], [[40.0, 70.0], [40.0, 70.0]])"
    assert value(own["edited and run again, under await"]) == "[100, 101]"

    # a line arrives at once, whole, and with its rank
    tail = " é" + " ü" * 2000
    assert set(printed(own["lines"], "stdout").splitlines()) == {
        "[0-1] both",
        f"[0] rank 0{tail}",
        f"[1] rank 1{tail}",
    }
    assert printed(own["lines"], "stderr") == "[0-1] no end\n"

    # bars share one display, until they end
    assert set(printed(own["bars"], "stderr").splitlines()) == {
        "[0] done 100 % by 0",
        "[1] done 100 % by 1",
    }
    displays = [each for each in own["bars"] if each.output_type == "display_data"]
    assert [each.data["text/plain"] for each in displays] == [""]

    # a rank that fails is shown with the line of the cell
    failed = failure(own["fails"])
    assert failed.ename == "WorkerFailed"
    assert "rank 1" in failed.evalue
    assert 'raise ValueError("boom")  # line of the cell' in failed.evalue

    # the stop button ends all ranks, and the next cell runs
    assert failure(own["interrupted"]).ename == "KeyboardInterrupt"
    assert len(client.pids) == 2
    # Their server has ended too, so that whoever is process 1 reaps them, in its own time.
    assert not any(alive(pid) for pid in client.pids)
    assert value(own["after it"]) == "[100, 101]"
