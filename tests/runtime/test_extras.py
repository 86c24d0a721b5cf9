"""Optional packages: how to install them, and versions that are not tested."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from lockstep.errors import LockstepWarning
from lockstep.runtime.extras import _wanted, warn_untested
from tests.refused import refused


def test_an_extra_is_installed_from_where_the_package_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _wanted("tasks", tmp_path, None) == "'lockstep-train[tasks]'"
    origin = "https://host/it.whl"
    assert _wanted("tasks", tmp_path, origin) == f"'lockstep-train[tasks] @ {origin}'"
    (tmp_path / "src" / "lockstep").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    assert _wanted("tasks", tmp_path, None) == f"-e '{tmp_path}[tasks]'"
    monkeypatch.chdir(tmp_path)
    assert _wanted("tasks", tmp_path, None) == "-e '.[tasks]'"


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers", "ray_train"])
def test_without_its_library_an_import_names_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, module = name.removesuffix("_train"), f"lockstep.integrations.{name}"
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with refused("missing-extra") as caught:
        importlib.import_module(module)
    assert caught.value.values["what"].startswith(module)
    assert f"[{library}]" in caught.value.values["install"]


def test_another_version_than_the_tested_ones_is_named() -> None:
    warn_untested("pytest", "8.0", "99.0")
    with pytest.warns(LockstepWarning, match=r"pytest [\d.]+ is installed.* with 1.0 to 1.9"):
        warn_untested("pytest", "1.0", "1.9")
