"""Which rank's output goes where. Redirecting works on the process, so each case is a process of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launcher.logs import Tee

_CODE = """
import os, sys
from pathlib import Path
from lockstep.launcher import logs
logs.redirect(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
print("out")
print("err", file=sys.stderr)
os.write(1, b"from C\\n")
"""


def _output(*args: str) -> str:
    done = subprocess.run([sys.executable, "-c", _CODE, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    return done.stdout


def test_all_ranks_on_the_console_line_by_line() -> None:
    assert _output("1", "all") == "out\nerr\nfrom C\n"


def test_a_line_is_written_in_one_piece_also_when_python_is_unbuffered() -> None:
    """Ranks share the terminal: what is written in pieces is mixed. A pipe in packet mode keeps the pieces apart."""
    reading, writing = os.pipe2(os.O_DIRECT)
    code = "from lockstep.launcher import logs; logs.redirect(0, 'all', None); print('one', 'line', flush=True)"
    subprocess.run([sys.executable, "-u", "-c", code], stdout=writing, check=True)
    os.close(writing)
    assert os.read(reading, 100) == b"one line\n"
    os.close(reading)


def test_only_the_first_rank_on_the_console() -> None:
    assert _output("0", "first") == "out\nerr\nfrom C\n"
    assert not _output("1", "first")


def test_the_other_ranks_write_to_their_logs_what_c_prints_included(tmp_path: Path) -> None:
    assert not _output("1", "first", str(tmp_path))
    assert (tmp_path / "rank-1.log").read_text() == "out\nerr\nfrom C\n"


def test_the_first_rank_writes_to_both(tmp_path: Path) -> None:
    assert _output("0", "first", str(tmp_path)) == "out\nerr\nfrom C\n"
    assert (tmp_path / "rank-0.log").read_text() == "out\nerr\n"


def test_all_ranks_write_to_both(tmp_path: Path) -> None:
    assert _output("3", "all", str(tmp_path)) == "out\nerr\nfrom C\n"
    assert (tmp_path / "rank-3.log").read_text() == "out\nerr\n"


@pytest.mark.parametrize(
    ("text", "copied"),
    [("loss 0.1\n", "loss 0.1\n"), ("\x1b[31mred\x1b[0m\n", "red\n"), ("\r 50 %", ""), ("\x1b[2K\x1b[1A 50 %", ""), ("dos\r\n", "dos\r\n")],
)
def test_redraws_and_colours_stay_out_of_the_copy(text: str, copied: str) -> None:
    stream, copy = io.StringIO(), io.StringIO()
    tee = Tee(stream, copy)
    assert tee.write(text) == len(text)
    assert stream.getvalue() == text
    assert copy.getvalue() == copied


def test_the_terminal_is_still_one() -> None:
    controller, terminal = os.openpty()
    with open(terminal, "w") as stream:
        tee = Tee(stream, io.StringIO())
        assert tee.isatty()
        assert tee.fileno() == terminal
        assert tee.encoding == stream.encoding
    del tee  # its stream is closed: it has no business there any more
    os.close(controller)


def test_a_full_disk_leaves_the_terminal(tmp_path: Path) -> None:
    shown = io.StringIO()
    with open("/dev/full", "wb", buffering=0) as full:
        tee = Tee(shown, io.TextIOWrapper(full, write_through=True))
        print("still here", file=tee, flush=True)
    assert shown.getvalue() == "still here\n"
