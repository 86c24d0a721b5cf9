"""A run directory of somebody else's may hold anything. The commands that read one end with an
answer or with an error of ours, and what they print cannot draw on the terminal.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.cli import app
from tests.simulation.seeds import tiers
from tests.training import toy

COMMANDS = ("report run", "checkpoints ls run", "checkpoints verify run", "verify run whole")
TEXTS = (
    *("", "null", "[]", "{}", "5", '"x"', "1" + "0" * 400, "[" * 100_000, '{"a":' * 50_000),
    *("\x00\x1b[31m", '{"\\u001b[31mkey\\u0007": 1}', '{"kind": "step", "step": {}, "loss": []}'),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 10**400, 2.5, "nan", "", "x\x1b[31m"),
    *([], [None], {}, {"a": {"b": 1}}, {"\x1b]0;x\x07": 1}),
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def changed(text: str, chance: random.Random) -> str:
    """Other contents of a file of JSON, one object or one a line."""
    if chance.random() < 0.3:
        return chance.choice(TEXTS)
    records = text.startswith('{"kind"')  # one a line
    lines = text.splitlines() if records else [text]
    number = chance.randrange(len(lines))
    whole = json.loads(lines[number])
    inside = whole
    while True:
        key = chance.choice([*(inside if isinstance(inside, dict) else range(len(inside)))])
        if not inside[key] or not isinstance(inside[key], dict | list) or chance.random() < 0.4:
            break
        inside = inside[key]
    inside[key] = chance.choice(VALUES)
    lines[number] = json.dumps(whole)
    return "\n".join(lines) + "\n"


def said(line: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["lockstep", *line.split()])
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        contextlib.suppress(SystemExit),
    ):
        app.main()
    return printed.getvalue()


@tiers(40, 300)
def test_commands_answer_or_refuse_whatever_the_files_hold(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lockstep.train(toy.task(), run="whole", steps=6, checkpoint_every=3)
    files = [
        file.relative_to("whole")
        for file in sorted(Path("whole").rglob("*.json*"))
        if not file.name.startswith("timeline")
    ]
    for seed in seeds:
        chance = random.Random(seed)
        file = chance.choice(files)
        shutil.copytree("whole", "run")
        text = changed(("whole" / file).read_text(), chance)
        ("run" / file).write_text(text)
        for line in COMMANDS:
            printed = said(line, monkeypatch)
            assert printed, (seed, line, file)
            assert not CONTROL.search(printed), (seed, line, file, printed)
        shutil.rmtree("run")
