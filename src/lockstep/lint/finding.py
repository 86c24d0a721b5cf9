"""One mistake at one place: what every rule returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Finding:
    """`line` counts from 1; `message` says what goes wrong and how to repair it, in one line."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"
