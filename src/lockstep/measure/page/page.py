"""All sections on one page of HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from lockstep.measure.page import buckets, curves, history, memory, origins, ranks
from lockstep.measure.page.recorded import Recorded
from lockstep.measure.verdict.judged import Judged, judged
from lockstep.training.resolve import short_name

FILE = "report.html"


def page(recorded: Recorded, sentences: Sequence[str]) -> str:
    """`sentences`: the verdict, on top. Raises UsageError without matplotlib."""
    found = _judged(recorded)
    sections = [
        curves.section(recorded),
        ranks.section(found),
        buckets.section(recorded.anatomy),
        memory.section(recorded.anatomy),
        history.checks(recorded, found),
        history.history(recorded),
        origins.section(recorded),
    ]
    return render(
        task=short_name(recorded.settings.task),
        run=recorded.run.resolve().name,
        state=recorded.state,
        facts=_facts(recorded),
        sentences=sentences,
        sections=[each for each in sections if not each.empty],
    )


def render(**what: Any) -> str:
    """report.html.jinja and style.css filled in; every text is escaped."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    def said(sentence: str) -> Markup:
        """Options and per cents do not break over lines."""
        text = str(escape(sentence)).replace(" %", "&nbsp;%")
        return Markup(re.sub(r"--[a-z-]+( [\w.:]+(?= \())?", r"<code>\g<0></code>", text))

    here = files("lockstep.measure.page")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["said"] = said
    template = environment.from_string(here.joinpath("report.html.jinja").read_text(encoding="utf-8"))
    return template.render(style=here.joinpath("style.css").read_text(encoding="utf-8"), **what)


def _judged(recorded: Recorded) -> Judged | None:
    return None if recorded.anatomy is None else judged(recorded.anatomy.longest, recorded.settings.grid)


def _facts(recorded: Recorded) -> list[tuple[str, str]]:
    """What a reader asks first."""
    result = recorded.result or {}
    last = recorded.steps[-1]["step"] if recorded.steps else None
    found = [("steps", result.get("steps", last)), ("epochs", result.get("epochs")), ("workers", result.get("workers"))]
    if isinstance(result.get("headline"), dict):
        found.append((str(result["headline"].get("name")), _short(result["headline"].get("value"))))
    if isinstance(result.get("seconds"), int | float):
        found.append(("seconds", f"{result['seconds']:.1f}"))
    found.append(("weights", str(result["sha256"])[:16] if "sha256" in result else None))
    return [(name, str(value)) for name, value in found if value is not None]


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
