"""Everything that `lockstep doctor` found: what it prints, and writes as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.tools.doctor import links
from lockstep.tools.doctor.links import Link
from lockstep.tools.finding import Finding


@dataclass(frozen=True, slots=True)
class Examined:
    """Of one host, or of several."""

    findings: Sequence[Finding]
    links: Sequence[Link]

    @property
    def fit(self) -> bool:
        return all(finding.level != "fix" for finding in self.findings)

    def text(self) -> str:
        """A line a check, the table of links, and the verdict last."""
        lines = [
            f"{finding.level:<6}{finding.name:<12}{finding.value}" for finding in self.findings
        ]
        table = ["", links.table(self.links)] if self.links else []
        return "\n".join([*lines, *table, "", self.verdict()])

    def verdict(self) -> str:
        """ "fit to train", or what to fix; warnings stand before either."""
        lines = [
            f"warning: {finding.name}: {finding.fix}"
            for finding in self.findings
            if finding.level == "warn"
        ]
        fixes = [finding for finding in self.findings if finding.level == "fix"]
        if not fixes:
            return "\n".join([*lines, "fit to train"])
        lines.append(f"not fit to train: {len(fixes)} thing{'s' * (len(fixes) != 1)} to fix")
        return "\n".join(
            [
                *lines,
                *(
                    f"{number}. {finding.name}: {finding.fix}"
                    for number, finding in enumerate(fixes, 1)
                ),
            ]
        )

    def as_json(self) -> dict[str, Any]:
        findings = [finding.as_json() for finding in self.findings]
        return {
            "fit": self.fit,
            "findings": findings,
            "links": [link.as_json() for link in self.links],
        }
