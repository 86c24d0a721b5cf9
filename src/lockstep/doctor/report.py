"""What `lockstep doctor` prints, and writes as JSON."""

from __future__ import annotations

from typing import Any

from lockstep.doctor import links
from lockstep.doctor.one_host import Examined


def text(found: Examined) -> str:
    """A line a check, the table of links, and the verdict last."""
    lines = [f"{finding.level:<6}{finding.name:<12}{finding.value}" for finding in found.findings]
    if found.links:
        lines += ["", links.table(found.links)]
    return "\n".join([*lines, "", verdict(found)])


def verdict(found: Examined) -> str:
    """ "fit to train", or what to fix; warnings stand before either."""
    lines = [f"warning: {finding.name}: {finding.fix}" for finding in found.findings if finding.level == "warn"]
    fixes = [finding for finding in found.findings if finding.level == "fix"]
    if not fixes:
        return "\n".join([*lines, "fit to train"])
    lines.append(f"not fit to train: {len(fixes)} thing{'s' * (len(fixes) != 1)} to fix")
    return "\n".join([*lines, *(f"{number}. {finding.name}: {finding.fix}" for number, finding in enumerate(fixes, 1))])


def as_json(found: Examined) -> dict[str, Any]:
    return {
        "fit": found.fit,
        "findings": [finding.as_json() for finding in found.findings],
        "links": [link.as_json() for link in found.links],
    }
