"""What ranks print, joined on its way: a launcher and ranks as processes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lockstep.launcher.forward import forwarded, pipe_of, write_all

ROOT = Path(__file__).parents[2]
_SPEAK = """
import os, sys
rank = os.environ["RANK"]
print("begin")
print("I am", rank)
os.system("echo from a child")
print("to stderr", file=sys.stderr)
print("no end", end="")
"""


def environment(temporary: Path) -> dict[str, str]:
    path = os.pathsep.join(part for part in (os.environ.get("PYTHONPATH"), str(ROOT)) if part)
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": str(temporary)}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "run", *args]


def run(folder: Path, text: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return subprocess.run([*command(*args), "script.py"], cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)


def expanded(out: str, ranks: int) -> dict[int, list[str]]:
    """Each rank's lines: the joined ones are given to all whom they name."""
    found: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    for line in out.splitlines():
        names, _, text = line[1:].partition("]")
        for part in names.split(","):
            first, _, last = part.partition("-")
            for rank in range(int(first), int(last or first) + 1):
                found[rank].append(text.removeprefix(" "))
    return found


def test_everything_that_ranks_print_arrives_on_its_stream_in_order_and_in_the_logs(tmp_path: Path) -> None:
    done = run(tmp_path, _SPEAK, "-n", "3", "--log", "logs")
    assert done.returncode == 0, done.stderr
    own = {rank: ["begin", f"I am {rank}", "from a child", "no end"] for rank in range(3)}
    assert expanded(done.stdout, 3) == own
    said, _, ours = done.stderr.rstrip().rpartition("\n")
    assert "never joined" in ours
    assert expanded(said, 3) == {rank: ["to stderr"] for rank in range(3)}
    for rank in range(3):
        assert (tmp_path / "logs" / f"rank-{rank}.log").read_text() == f"begin\nI am {rank}\nto stderr\nno end"


def test_what_all_say_is_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with forwarded(tmp_path, 3, window=60.0):
        for stream in ("out", "err"):
            for rank in (2, 0, 1):
                pipe_of(tmp_path, rank, stream).write_text(f"together on {stream}\nonly {rank % 2}\n")
    assert capfd.readouterr() == (
        "[0-2] together on out\n[1] only 1\n[0,2] only 0\n",
        "[0-2] together on err\n[1] only 1\n[0,2] only 0\n",
    )


def test_a_flood_of_more_than_a_pipe_holds_arrives_whole(tmp_path: Path) -> None:
    text = "import os\nfor number in range(20000): print(os.environ['RANK'], number, 'x' * 20)\n"
    done = run(tmp_path, text, "-n", "2")
    lines = expanded(done.stdout, 2)
    assert [lines[rank] == [f"{rank} {number} {'x' * 20}" for number in range(20000)] for rank in (0, 1)] == [True, True]


def test_a_killed_ranks_last_words_arrive(tmp_path: Path) -> None:
    text = """
import os, signal
if os.environ["RANK"] == "1":
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""
    done = run(tmp_path, text, "-n", "2")
    assert done.returncode == 137
    assert done.stdout == "[1] last words\n"
    last = done.stderr.splitlines()[-1]
    log = Path(last.split("log ")[1].split(")")[0])
    assert log.read_text() == "last words\n"
    assert "was killed by signal 9 (SIGKILL)" in last


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path: Path) -> None:
    text = "import pathlib, os\nfor number in range(20000): print(number)\npathlib.Path('done' + os.environ['RANK']).touch()\n"
    (tmp_path / "script.py").write_text(text)
    with subprocess.Popen([*command("-n", "2"), "script.py"], cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(60) == 0
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()


def test_a_terminal_that_somebody_made_non_blocking_gets_everything() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    data, arrived = os.urandom(10**6), bytearray()
    writer = threading.Thread(target=lambda: (write_all(writing, data), os.close(writing)))
    writer.start()
    os.set_blocking(reading, True)
    while piece := os.read(reading, 5000):
        arrived += piece
    writer.join()
    os.close(reading)
    assert bytes(arrived) == data


def test_on_a_terminal_rank_0_has_it_directly(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['RANK'], sys.stdout.isatty(), sys.stderr.isatty())")
    controller, terminal = pty.openpty()
    done = subprocess.Popen([*command("-n", "3"), "script.py"], cwd=tmp_path, env=environment(tmp_path), stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 1000):
            shown += piece
    except OSError:  # the terminal is closed when all have left
        pass
    os.close(controller)
    assert done.wait(60) == 0
    lines = shown.decode().split("\r\n")
    assert sorted(line for line in lines if "ranks" not in line) == ["", "0 True True", "[1] 1 False False", "[2] 2 False False"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_last_lines_of_a_rank_that_was_not_on_the_terminal_are_shown(rank: int, tmp_path: Path) -> None:
    text = f"import os\nprint('said by', os.environ['RANK'])\nif os.environ['RANK'] == '{rank}': raise ValueError('boom')\nimport signal; signal.pause()"
    (tmp_path / "script.py").write_text(text)
    code = "from lockstep.launcher.supervise import *; supervise(Target(script='script.py'), 2, console='first')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    lines = done.stderr.splitlines()
    assert lines[: 2 * rank] == ["the last that rank 1 printed:", "said by 1"][: 2 * rank]
    assert lines[2 * rank] == "Traceback (most recent call last):"
    assert lines[-1].endswith("failed: ValueError: boom")
    assert f"rank-{rank}.log) failed" in lines[-1]
