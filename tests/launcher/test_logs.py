"""Which rank's output goes where. Redirecting works on the process, so each case is a process of
its own.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.launcher.logs import MOST_DIRECTORIES, Tee, log_directory, tail

_CODE = """
import os, sys
from pathlib import Path
from lockstep.launcher import logs
logs.redirect(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]) if len(sys.argv) > 3 else None)
print("out")
print("err", file=sys.stderr)
os.write(1, b"from C\\n")
"""
_PYTHON, _ALL = "out\nerr\n", "out\nerr\nfrom C\n"


def test_which_rank_writes_to_the_console_and_what_is_in_its_log(tmp_path: Path) -> None:
    for rank, console, shown, logged in (
        (1, "all", _ALL, None),
        (0, "first", _ALL, None),
        (1, "first", "", None),
        (1, "first", "", _ALL),
        (0, "first", _ALL, _PYTHON),
        (3, "all", _ALL, _PYTHON),
    ):
        folder = [] if logged is None else [str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-c", _CODE, str(rank), console, *folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        assert done.stdout == shown
        logs = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert logs == ({} if logged is None else {f"rank-{rank}.log": logged})
        for path in tmp_path.iterdir():
            path.unlink()


_FORKED = """
import os, sys
from lockstep.launcher import logs
read, write = os.pipe()
os.dup2(write, 1)
logs.redirect(0, "all", None)
sys.stdout.reconfigure(encoding="ascii", errors="backslashreplace")
print("\xfc")
assert os.read(read, 99) == b"\\\\xfc\\n"
"""


def test_a_program_may_set_up_its_streams_though_the_server_wrote_to_a_file(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        subprocess.run([sys.executable, "-c", _FORKED], stdout=file, check=True)


def test_redraws_and_colours_stay_out_of_the_copy() -> None:
    copies = {
        "loss 0.1\n": "loss 0.1\n",
        "\x1b[31mred\x1b[0m\n": "red\n",
        "\r 50 %": "",
        "\x1b[2K\x1b[1A 50 %": "",
        "dos\r\n": "dos\r\n",
    }
    for text, copied in copies.items():
        stream, copy = io.StringIO(), io.StringIO()
        assert Tee(stream, copy).write(text) == len(text)
        assert (stream.getvalue(), copy.getvalue()) == (text, copied)


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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"lockstep-{os.getuid()}"


def test_a_place_of_ones_own_goes_when_all_went_well_and_one_that_was_asked_for_stays(
    home: Path,
) -> None:
    with log_directory(None) as place:
        assert place.path.parent == home
        assert place.path.stat().st_mode & 0o077 == 0
        (place.path / "rank-0.log").write_text("fine")
    assert not list(home.iterdir())
    wanted = home.with_name("wanted")
    wanted.mkdir()
    with log_directory(wanted) as place:
        assert place.path == wanted
    assert wanted.exists()


def test_it_stays_where_it_is_wanted_and_the_oldest_of_many_goes(home: Path) -> None:
    paths = []
    for number in range(MOST_DIRECTORIES + 2):
        with log_directory(None) as place:
            place.keep = True
        os.utime(place.path / "kept", (number, number))
        paths.append(place.path)
    assert [path.exists() for path in paths] == [False, False] + [True] * MOST_DIRECTORIES


def test_what_a_killed_launcher_left_goes_and_what_a_living_one_has_stays(home: Path) -> None:
    with log_directory(None) as living:
        dead = home / "logs-4194399-12345-x"
        dead.mkdir()
        with log_directory(None):
            assert living.path.exists()
            assert not dead.exists()


def test_a_kept_directory_that_another_command_removes_meanwhile_is_no_error(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log_directory(None) as place:
        place.keep = True
    status = Path.stat

    def removed_after_the_first_look(self: Path, **options: bool) -> os.stat_result:
        result = status(self, **options)
        if self.parent == place.path:
            shutil.rmtree(place.path)
        return result

    monkeypatch.setattr(Path, "stat", removed_after_the_first_look)
    with log_directory(None) as other:
        assert other.path.is_dir()
    assert not place.path.exists()


def test_the_tail_is_the_end_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rank-1.log"
    assert tail(file) == ""
    file.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(file, 2) == "line 99998\nline 99999"
    file.write_bytes(b"\xff one line without an end")
    assert tail(file).endswith("one line without an end")
