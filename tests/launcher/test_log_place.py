"""Where logs lie, and how long."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launcher import log_place as place_module
from lockstep.launcher.log_place import directory_for_logs, log_place, tail


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"lockstep-{os.getuid()}"


def test_a_place_of_ones_own_goes_when_all_went_well(home: Path) -> None:
    with log_place(None) as place:
        assert place.path.parent == home
        assert place.path.stat().st_mode & 0o077 == 0
        (place.path / "rank-0.log").write_text("fine")
    assert not list(home.iterdir())


def test_it_stays_where_it_is_wanted_and_the_oldest_of_many_goes(home: Path) -> None:
    paths = []
    for number in range(place_module.KEPT + 2):
        with log_place(None) as place:
            place.keep = True
        os.utime(place.path, (number, number))
        paths.append(place.path)
    assert [path.exists() for path in paths] == [False, False] + [True] * place_module.KEPT


def test_what_a_killed_launcher_left_goes_and_what_a_living_one_has_stays(home: Path) -> None:
    with log_place(None) as living:
        dead = home / "logs-4194399-12345-x"
        dead.mkdir()
        with log_place(None):
            assert living.path.exists()
            assert not dead.exists()


def test_the_directory_that_was_asked_for_stays(home: Path, tmp_path: Path) -> None:
    with log_place(tmp_path / "mine") as place:
        assert place.path == tmp_path / "mine"
        assert not home.exists()


def test_a_directory_is_made_or_refused_with_a_sentence(tmp_path: Path) -> None:
    assert directory_for_logs(None) is None
    made = directory_for_logs(tmp_path / "a" / "b")
    assert made is not None
    assert made.is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--log .*file/x: no directory can be made there \(Not a directory\); give another"):
        directory_for_logs(tmp_path / "file" / "x")


def test_the_tail_is_the_end_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "rank-1.log"
    assert tail(file) == ""
    file.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(file, 2) == "line 99998\nline 99999"
    file.write_bytes(b"\xff one line without an end")
    assert tail(file).endswith("one line without an end")
