"""Methods as they are written on the command line of `lockstep train`: the same text in a plan and in what was measured."""

from __future__ import annotations

import shlex
from typing import Any

from lockstep.errors import UsageError
from lockstep.method import Method

METHODS = (
    "native",
    "--compress bf16",
    "--compress fp16",
    "--compress int8",
    "--compress powersgd:4",
    "--compress topk:0.01",
    "--sync-every 10",
    "--sync-every 5 --compress int8",
    "--sync-every 50",
    "--sync-every 500",
    "--sync-every 500 --outer nesterov",
    "--update server",
    "ring",
    "central",
)
_NAMES = ("reduce", "compress", "update", "staleness", "sync_every", "outer")


def method_of(text: str) -> Method:
    """`--compress bf16`, `--sync-every 50 --outer nesterov`; a bare word is a way to sum. Raises UsageError."""
    words = shlex.split(text)
    if words and not words[0].startswith("-"):
        words = ["--reduce", *words]
    given: dict[str, Any] = {}
    for option, value in zip(words[::2], words[1::2], strict=False):
        given[option.removeprefix("--").replace("-", "_")] = value
    if len(words) % 2 or not words or not set(given) <= set(_NAMES):
        raise UsageError(f"method {text!r}: write it with the options of `lockstep train`, such as --compress bf16, or as a way to sum")
    if "sync_every" in given:
        given["sync_every"] = int(given["sync_every"]) if given["sync_every"].isdigit() else given["sync_every"]
    return Method(**given)
