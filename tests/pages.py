"""Status pages of other ranks, as a test writes them."""

from __future__ import annotations

import time

from lockstep.runtime.status import Page
from lockstep.runtime.step_clock import INDEX


def enter(page: Page, phase: str, now: int | None = None) -> None:
    """The page's rank begins a phase."""
    page.fields.phase = INDEX[phase]
    page.fields.since = time.monotonic_ns() if now is None else now
    page.fields.ticks += 1


def step(page: Page, number: int) -> None:
    """The page's rank begins a step."""
    page.fields.step = number
    page.fields.ticks += 1


def wait(page: Page) -> None:
    """The page's rank begins to wait for others."""
    page.fields.waits = 1
    page.fields.ticks += 1
