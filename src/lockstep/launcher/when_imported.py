"""Change a module of a library in a rank's process, without importing it for a program that does
not need it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, change: Callable[[ModuleType], object]) -> None:
    """Call `change` with the module: now if it is imported, else after it has run and before others
    import from it.
    """
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_then_change(module: ModuleType) -> None:
                run(module)
                self._change(module)

            spec.loader.exec_module = run_then_change  # type: ignore[method-assign]
        return spec
