"""One module a rule; each is a function from a file's Source to the Problems in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockstep.lint.rules import clip, forward, no_sync, rank_conditional, set_epoch
from lockstep.lint.source import Problem, Source

Rule = Callable[[Source], Iterator[Problem]]
RULES: tuple[Rule, ...] = (no_sync.check, forward.check, set_epoch.check, rank_conditional.check, clip.check)
NAMES = (no_sync.MODULO, no_sync.TAIL, forward.NAME, set_epoch.NAME, rank_conditional.NAME, clip.NAME)

__all__ = ["NAMES", "RULES"]
