"""How to install an extra, for a checkout, a package index and any other place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.runtime.extras import _wanted


def test_an_extra_is_installed_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _wanted("lint", tmp_path, None) == "'lockstep-train[lint]'"
    origin = "https://host/it.whl"
    assert _wanted("lint", tmp_path, origin) == f"'lockstep-train[lint] @ {origin}'"
    (tmp_path / "src" / "lockstep").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert _wanted("lint", tmp_path, None) == f"-e '{tmp_path}[lint]'"
    monkeypatch.chdir(tmp_path)
    assert _wanted("lint", tmp_path, None) == "-e '.[lint]'"
