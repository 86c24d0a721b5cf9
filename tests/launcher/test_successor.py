"""What a task's file imports is warm at a restart, unless importing it has done what a fresh
process of each rank would have done for itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.launcher import failures, seat
from lockstep.launcher.server import WARM, Answer, Server
from lockstep.launcher.successor import Imports, noted
from tests.ending import wait_gone

PATIENCE = 60.0


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that imports as good as nothing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(WARM)}
    with closing(Server.start(["lockstep.launcher.seat"], environment, cold=False)) as server:
        yield server


def tell(descriptor: int) -> None:
    found = {
        "warm": seat.forked,
        "parent": os.getppid(),
        "mine": "mine" in sys.modules,
        "set": os.environ.get("SET_BY_MINE"),
    }
    os.write(descriptor, json.dumps(found).encode())


def forked(server: Server) -> dict[str, object]:
    found: dict[str, object] = json.loads(server.answer(tell))
    return found


def prepare(server: Server, folder: Path, source: str) -> None:
    (folder / "mine.py").write_text(source)
    server.prepare_successor(Imports([str(folder), *sys.path], ["mine"]), ["RANK"])


@pytest.mark.parametrize(
    "source",
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(1000,),"
            " daemon=True).start()"
        ),
        "import os; rank = os.environ.get('RANK')",
        "import os; rank = int(os.getenv('RANK', '-1'))",
        "import os; here = 'RANK' in os.environ",
        "import os; environment = dict(os.environ)",
        "import tempfile; file = tempfile.TemporaryFile()",
        "import socket; link = socket.socket()",
        (
            "import os, pathlib, time\nif not os.fork():\n   "
            " pathlib.Path(__file__).with_name('child').write_text(str(os.getpid()))\n   "
            " time.sleep(1000)"
        ),
    ],
    ids=["thread", "rank", "getenv", "in", "copy", "file", "socket", "process"],
)
def test_what_would_differ_in_a_fresh_process_is_left_to_the_ranks(
    forking: Server, tmp_path: Path, source: str
) -> None:
    prepare(forking, tmp_path, source)
    assert forked(forking.newest(PATIENCE)) == {
        "warm": True,
        "parent": forking.pid,
        "mine": False,
        "set": None,
    }
    wait_gone([int(file.read_text()) for file in tmp_path.glob("child") if file.read_text()])


def test_what_is_safe_is_warm_and_no_import_is_printed(
    forking: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(forking, tmp_path, "import os; os.environ['SET_BY_MINE'] = 'yes'; print('imported')")
    found = forked(forking.newest(PATIENCE))
    assert (found["warm"], found["mine"], found["set"]) == (True, True, "yes")
    assert found["parent"] != forking.pid
    assert forked(forking.newest())["parent"] == found["parent"], "it stays"
    assert capfd.readouterr().out == ""


def test_a_module_that_has_changed_since_is_imported_anew(forking: Server, tmp_path: Path) -> None:
    prepare(
        forking, tmp_path, "import pathlib; pathlib.Path(__file__).with_name('imported').touch()"
    )
    while not (tmp_path / "imported").exists():
        forking.wait(0.01)
    (tmp_path / "mine.py").write_text("changed = True")
    assert forked(forking.newest(PATIENCE))["mine"] is False


def test_a_module_of_the_users_that_it_has_imported_is_no_reason_for_a_fresh_process(
    forking: Server, tmp_path: Path
) -> None:
    prepare(forking, tmp_path, "")
    successor = forking.newest(PATIENCE)
    reading, writing = os.pipe()
    with os.fdopen(reading) as stream:
        pid = successor.fork(seat.Seat(work=Answer(tell)), (0, 1, 2, writing), beside=["mine"])
        os.close(writing)
        found = json.loads(stream.read())
    successor.release(pid)
    assert (found["warm"], found["mine"]) == (True, True)


def test_one_that_still_imports_is_not_waited_for(forking: Server, tmp_path: Path) -> None:
    prepare(forking, tmp_path, "import time; time.sleep(1000)")
    assert forked(forking.newest())["mine"] is False


def test_the_first_rank_of_a_host_leaves_what_its_task_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("of_task", "task_itself"):
        (tmp_path / f"{name}.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv(failures.DIRECTORY, str(tmp_path))
    for local_rank, left in (("1", None), ("0", ["of_task"])):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with noted(tmp_path / "task_itself.py"):
            __import__("of_task")
            __import__("task_itself")
        found = Imports.read(tmp_path)
        assert (None if found is None else found.names) == left
        for name in ("of_task", "task_itself"):
            monkeypatch.delitem(sys.modules, name)
