"""Without an integration's library, its import names the command that installs it."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.refused import refused


@pytest.mark.parametrize("name", ["accelerate", "lightning", "transformers", "ray_train"])
def test_the_import_names_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, module = name.removesuffix("_train"), f"lockstep.integrations.{name}"
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with refused("missing-extra") as caught:
        importlib.import_module(module)
    assert caught.value.values["what"].startswith(module)
    assert f"[{library}]" in caught.value.values["install"]
