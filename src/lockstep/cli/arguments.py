"""What several commands check in the same way before they import torch: the task's name and
--set, and numbers that are too small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.cli.options import option_name
from lockstep.errors import UsageError


def task_of(
    task: str, override: Sequence[str] | Mapping[str, str] | None
) -> tuple[str, dict[str, str]]:
    """The task's place and the values of --set. Raises TaskError and UsageError for what the
    task's file shows to be wrong.
    """
    from lockstep.config.settings import overrides_of
    from lockstep.training.resolve import located

    overrides = (
        dict(override) if isinstance(override, Mapping) else overrides_of(list(override or []))
    )
    return located(task, overrides), overrides


def at_least_one(**options: float | None) -> None:
    """Raises UsageError for an option, named as Python names it, that is below 1; None is not
    given.
    """
    for name, value in options.items():
        if value is not None and value < 1:
            raise UsageError("below-one", option=option_name(name), value=value)
