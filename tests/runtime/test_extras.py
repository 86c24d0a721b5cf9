"""How to install an extra, for a checkout, a package index and any other place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.runtime.extras import _wanted, install


def test_in_a_checkout_it_is_installed_again_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src" / "lockstep").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert _wanted("lint", tmp_path, None) == f"-e '{tmp_path}[lint]'"
    monkeypatch.chdir(tmp_path)
    assert _wanted("lint", tmp_path, None) == "-e '.[lint]'"


def test_elsewhere_from_where_it_came(tmp_path: Path) -> None:
    assert _wanted("lint", tmp_path, None) == "'lockstep-train[lint]'"
    assert (
        _wanted("lint", tmp_path, "https://host/it.whl")
        == "'lockstep-train[lint] @ https://host/it.whl'"
    )


def test_the_whole_command() -> None:
    assert install("tasks").startswith("pip install ")
    assert "[tasks]" in install("tasks")
