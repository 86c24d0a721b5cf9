"""What a task's file shows without being run: mistakes are told, and what cannot be told is left
alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from lockstep.errors import TaskError
from lockstep.training.declared import declares_task, located
from tests.refused import refused

HEAD = "import nothing_that_exists\n\n\n"


def write(folder: Path, text: str) -> str:
    file = folder / "mine.py"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("def task(:\n", {}, ["line 1", "def task(:", "[task-file-not-python]"]),
        ("return 1\n", {}, ["line 1", "[task-file-not-python]"]),
        (HEAD + "lr = 0.1\n", {}, ["[task-function-missing]"]),
        (HEAD + "def other():\n    def task(): ...\n", {}, ["[task-function-missing]"]),
        (
            HEAD + "def task(lr=0.1, *, width=8): ...\n",
            {"rate": "1"},
            ["--set rate=1", "it takes lr, width", "[override-unknown]"],
        ),
        (
            HEAD + "def task(lr=0.1): ...\n",
            {"lr": "fast"},
            ["--set lr=fast", "a number", "[override-wrong-value]"],
        ),
        (
            HEAD + "def task(kind: Literal['a', 'b'] = 'a'): ...\n",
            {"kind": "c"},
            ["a or b", "[override-wrong-value]"],
        ),
        (
            HEAD + "def task(width: 'int | None' = None): ...\n",
            {"width": "wide"},
            ["a whole number", "[override-wrong-value]"],
        ),
        (HEAD + "def task(lr): ...\n", {}, ["lr", "[task-argument-missing]"]),
    ],
)
def test_mistakes_that_show(
    tmp_path: Path, text: str, overrides: Mapping[str, str], words: list[str]
) -> None:
    with pytest.raises(TaskError) as caught:
        located(write(tmp_path, text), overrides)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("def task(lr=0.1, width: int | None = None): ...\n", {"lr": "1e-3", "width": "none"}),
        ("from elsewhere import task\n", {"rate": "1"}),
        ("from elsewhere import *\n", {}),
        ("task = make()\n", {"rate": "1"}),
        ("@decorated\ndef task(): ...\n", {"rate": "1"}),
        ("if here:\n    def task(): ...\nelse:\n    def task(rate): ...\n", {"rate": "1"}),
        ("def make():\n    global task\n    task = 1\n", {}),
        ("globals()['task'] = make\n", {}),
        ("def task(kind: Kind = 1, rate=compute()): ...\n", {"kind": "any", "rate": "any"}),
    ],
)
def test_what_does_not_show_is_left_to_the_run(
    tmp_path: Path, text: str, overrides: Mapping[str, str]
) -> None:
    place = write(tmp_path, HEAD + text)
    assert located(place, overrides) == place


def test_the_bundled_tasks_are_looked_at_too() -> None:
    assert located("digits", {"lr": "0.1"}) == "digits"
    with refused("override-unknown", TaskError, key="rate") as caught:
        located("digits", {"rate": "1"})
    assert caught.value.values["known"].startswith("it takes epochs, lr")


def test_whether_a_file_declares_a_task(tmp_path: Path) -> None:
    assert declares_task(Path(write(tmp_path, "def task(): ...\n")))
    assert not declares_task(Path(write(tmp_path, "class A:\n    def task(self): ...\n")))
