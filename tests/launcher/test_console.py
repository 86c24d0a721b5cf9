"""What ranks print, joined on its way."""

from __future__ import annotations

import os
import pty
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launcher import console
from lockstep.launcher.console import Joiner, Lines, forwarded
from tests.launcher.conftest import Run

_SPEAK = """
import os, sys
rank = os.environ["RANK"]
print("begin")
print("I am", rank)
os.system("echo from a child")
print("to stderr", file=sys.stderr)
print("no end", end="")
"""


def started(
    folder: Path, text: str, workers: int, stdout: int, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), "script.py"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=stdout, stderr=stderr)


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


def test_everything_that_ranks_print_arrives_on_its_stream_in_order_and_in_the_logs(
    run: Run, tmp_path: Path
) -> None:
    code, out, err = run(_SPEAK, 3, console="joined", logs=tmp_path)
    assert code == 0, err
    own = {rank: ["begin", f"I am {rank}", "from a child", "no end"] for rank in range(3)}
    assert expanded(out, 3) == own
    said, _, ours = err.rstrip().rpartition("\n")
    assert "never joined" in ours
    assert expanded(said, 3) == {rank: ["to stderr"] for rank in range(3)}
    for rank in range(3):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert log == f"begin\nI am {rank}\nto stderr\nno end"


def test_what_all_say_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    with forwarded(range(3), window=60.0) as streams:
        for number, stream in enumerate(("out", "err"), 1):
            for rank in (2, 0, 1):
                text = f"together on {stream}\nonly {rank % 2}\n"
                os.write(streams[rank][number], text.encode())
    assert capfd.readouterr() == (
        "[0-2] together on out\n[1] only 1\n[0,2] only 0\n",
        "[0-2] together on err\n[1] only 1\n[0,2] only 0\n",
    )


def test_a_flood_arrives_whole_and_so_do_a_killed_ranks_last_words(run: Run) -> None:
    """The flood is more than a pipe holds."""
    text = """
import os, signal, time
from pathlib import Path
for number in range(20000): print(os.environ["RANK"], number, "x" * 20)
print(end="", flush=True)
if os.environ["RANK"] == "0":
    Path("done").touch()
    signal.pause()
while not Path("done").exists():
    time.sleep(0.01)
print("last words", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, out, err = run(text, console="joined")
    assert code == 137
    lines = expanded(out, 2)
    for rank, words in ((0, []), (1, ["last words"])):
        flood = [f"{rank} {number} {'x' * 20}" for number in range(20000)]
        assert lines[rank] == [*flood, *words]
    last = err.splitlines()[-1]
    log = Path(last.split("log ")[1].split(")")[0])
    assert log.read_text().endswith("\nlast words\n")
    assert "was killed by signal 9 (SIGKILL)" in last


def test_a_reader_that_leaves_does_not_stop_the_run(tmp_path: Path) -> None:
    text = """
import os, pathlib
for number in range(20000): print(number)
pathlib.Path("done" + os.environ["RANK"]).touch()
"""
    with started(tmp_path, text, 2, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.wait() == 0
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()


def test_on_a_terminal_rank_0_has_it_directly(tmp_path: Path) -> None:
    text = "import os, sys; print(os.environ['RANK'], sys.stdout.isatty(), sys.stderr.isatty())"
    controller, terminal = pty.openpty()
    done = started(tmp_path, text, 3, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(controller, 1000):
            shown += piece
    except OSError:  # the terminal is closed when all have left
        pass
    os.close(controller)
    assert done.wait() == 0
    lines = shown.decode().split("\r\n")
    assert sorted(line for line in lines if "ranks" not in line) == [
        "",
        "0 True True",
        "[1] 1 False False",
        "[2] 2 False False",
    ]


def test_a_line_of_all_leaves_at_once_and_one_of_some_when_its_time_has_come() -> None:
    joiner = Joiner(3)
    for rank in (2, 0, 1):
        assert joiner.add(rank, "epoch 1", now=0.0) == []
    assert joiner.ready(now=0.0) == ["[0-2] epoch 1"]
    assert joiner.due() is None
    joiner = Joiner(8)
    for rank in (7, 3, 0, 1):
        joiner.add(rank, "warning", now=1.0)
    assert joiner.due() == pytest.approx(1.1)
    assert joiner.ready(now=1.05) == []
    assert joiner.ready(now=1.1) == ["[0-1,3,7] warning"]
    joiner.add(5, "warning", now=1.2)
    assert joiner.end() == ["[5] warning"], "which comes after the window"


@pytest.mark.parametrize(
    ("lines", "joined"),
    [
        (
            [(0, "begin"), (0, "I am 0"), (0, "end"), (1, "begin"), (1, "I am 1"), (1, "end")],
            ["[0-1] begin", "[1] I am 1", "[0] I am 0", "[0-1] end"],
        ),
        ([(0, "again"), (0, "again"), (1, "again")], ["[0-1] again", "[0] again"]),
        ([(0, "a"), (0, "b"), (1, "b"), (1, "a")], ["[0] a", "[0-1] b", "[1] a"]),
        # colours do not tell lines apart, and the first rank's are shown
        ([(1, "x"), (0, "\x1b[31mx\x1b[0m")], ["[0-1] \x1b[31mx\x1b[0m"]),
    ],
)
def test_what_is_joined(lines: list[tuple[int, str]], joined: list[str]) -> None:
    joiner = Joiner(2)
    for rank, line in lines:
        joiner.add(rank, line, now=0.0)
    assert joiner.end() == joined


_Heard = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("abc"), st.floats(0, 0.08)), max_size=60
)


@given(_Heard)
def test_whatever_comes_every_ranks_lines_come_out_in_their_order_and_in_time(
    heard: list[tuple[int, str, float]],
) -> None:
    joiner, now, out = Joiner(4), 0.0, list[str]()
    for rank, line, pause in heard:
        now += pause
        out += joiner.ready(now)
        out += joiner.add(rank, line, now)
        due = joiner.due()
        assert due is None or now < due <= now + console.WINDOW
    out += joiner.end()
    spoken = {rank: [text for other, text, _ in heard if other == rank] for rank in range(4)}
    assert expanded("\n".join(out), 4) == spoken


def test_a_flood_does_not_wait() -> None:
    joiner = Joiner(2)
    left = sum(len(joiner.add(0, f"line {number}", now=0.0)) for number in range(5000))
    assert 5000 - left == len(joiner.end()) == console._MOST


def test_bytes_become_lines_whatever_the_cuts_and_of_a_bar_only_the_last_state_counts() -> None:
    texts = {
        "eins\nzwei ü\r\ndrei": ["eins", "zwei ü", "drei"],
        "\r 10%\r 50%\r100%\nnext": ["100%", "next"],
    }
    for text, expected in texts.items():
        octets = text.encode()
        for cut in range(len(octets)):
            lines = Lines()
            shown = [*lines.feed(octets[:cut]), *lines.feed(octets[cut:]), *lines.end()]
            assert shown == expected


def test_a_bar_that_is_redrawn_for_hours_takes_no_memory_and_an_endless_line_comes_in_pieces() -> (
    None
):
    lines = Lines()
    for number in range(1000):
        assert lines.feed(f"\r{number:06} {'#' * 500}".encode()) == []
    assert len(lines._rest) < 600
    pieces = lines.feed(b"x" * 200_000)
    assert "".join([*pieces, *lines.end()]).endswith("x" * 200_000)
    assert max(map(len, pieces)) == console._LONGEST


def test_more_ranks_than_this_process_may_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files + 50, before[1]))
    try:
        with console.forwarded(range(100)) as streams:
            assert len(streams) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files + 50, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
