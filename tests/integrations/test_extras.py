"""Without an integration's library, its import names the command that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.refused import refused


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("accelerate", "accelerate"),
        ("lightning", "lightning"),
        ("transformers", "transformers"),
        ("ray", "ray_train"),
    ],
)
def test_the_import_names_the_command_that_installs_it(
    library: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"lockstep.integrations.{name}"
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with refused("missing-extra") as caught:
        importlib.import_module(module)
    assert caught.value.values["what"].startswith(module)
    assert f"[{library}]" in caught.value.values["install"]
