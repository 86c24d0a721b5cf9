"""From a name or a path to a Task, from any folder; the user's mistakes are sentences, the
user's bugs are the user's own.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.config.task import Task
from lockstep.errors import TaskError
from lockstep.training.resolve import locate, resolve, short_name
from tests.refused import refused

GOOD = """
from dataclasses import replace
from beside import SAMPLES
from tests.training import toy

class Own:
    pass

def task(lr: float = 0.5, samples: int = SAMPLES):
    return toy.task(name=None, train_data=toy.data(samples, 1))
"""


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """sys.path and sys.modules as they were."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if not name.startswith(("torch", "numpy", "lockstep.", "tests.")):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("SAMPLES = 30")
    (tmp_path / "my_own.py").write_text(GOOD)
    return tmp_path


def test_a_file_by_relative_and_absolute_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absolute = str(folder / "my_own.py")
    assert locate(absolute) == absolute
    monkeypatch.chdir(folder.parent)
    for name in (
        absolute,
        f"{folder.name}/my_own.py",
        f"./{folder.name}/../{folder.name}/my_own.py",
    ):
        task = resolve(name, {"samples": "20"})
        assert (task.name, len(task.train_data)) == ("my_own", 20)  # type: ignore[arg-type]
    monkeypatch.chdir(folder)
    assert resolve("my_own.py").name == "my_own"
    assert locate("my_own.py") == absolute


def test_classes_of_the_file_can_be_pickled(folder: Path) -> None:
    resolve(str(folder / "my_own.py"))
    made = sys.modules["my_own"].Own()
    assert isinstance(pickle.loads(pickle.dumps(made)), sys.modules["my_own"].Own)


@pytest.mark.parametrize("name", ["random.py", "this.py", "my-task.py", "pytest.py", "2.py"])
def test_a_file_may_be_called_like_a_module_or_like_none(folder: Path, name: str) -> None:
    (folder / "my_own.py").rename(folder / name)
    known = sys.modules.get(Path(name).stem)
    assert resolve(str(folder / name)).name == Path(name).stem
    assert sys.modules.get(Path(name).stem) is known


@pytest.mark.parametrize(
    ("name", "known"),
    [("digit", "digits, text (did you mean 'digits'?)"), ("resnet", "digits, text")],
)
def test_a_name_that_is_none(name: str, known: str) -> None:
    with refused("unknown-task", TaskError, task=name, known=known):
        locate(name)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere.py", "does not exist (looked from /"),
        ("./nowhere", "does not exist"),
        ("/tmp", "is a folder"),
    ],
)
def test_a_path_that_is_none(name: str, problem: str) -> None:
    with refused("task-file-missing", TaskError, task=name) as caught:
        locate(name)
    assert caught.value.values["problem"].startswith(problem)


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("x = 1", "task-function-missing", {"found": "not defined"}),
        ("task = 3", "task-function-missing", {"found": "a int"}),
        (
            "from tests.training import toy\ntask = toy.task()",
            "task-function-missing",
            {"found": "a Task"},
        ),
        (
            "def task(): pass",
            "wrong-return-type",
            {"type": "NoneType", "expected": "a lockstep.Task"},
        ),
        ("def task(): return {'model': 1}", "wrong-return-type", {"type": "dict"}),
        ("def task(lr): pass", "task-argument-missing", {"key": "lr"}),
    ],
)
def test_a_file_without_a_task(
    tmp_path: Path, text: str, code: str, values: dict[str, str]
) -> None:
    (tmp_path / "t.py").write_text(text)
    with refused(code, TaskError, **values) as caught:
        resolve(str(tmp_path / "t.py"))
    assert str(tmp_path / "t.py") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import no_such_module", ModuleNotFoundError),
        ("def task(: pass", SyntaxError),
        ("def task():\n    return 1 / 0", ZeroDivisionError),
        ("from nowhere import x", ImportError),
    ],
)
def test_the_users_own_exception_comes_through(
    tmp_path: Path, text: str, error: type[Exception]
) -> None:
    file = tmp_path / "t.py"
    file.write_text(text)
    with pytest.raises(error) as raised:
        resolve(str(file))
    frames = [entry.path for entry in raised.traceback]
    assert str(file) in map(str, frames) or error is SyntaxError
    assert not any("importlib" in str(frame) for frame in frames)
    assert ("t" in sys.modules) == (error is ZeroDivisionError)


def test_the_bundled_tasks_resolve() -> None:
    for name in ("digits", "text"):
        task = resolve(name, {"seed": "5"})
        assert isinstance(task, Task)
        assert (task.name, task.seed) == (name, 5)
        assert (locate(name), short_name(name)) == (name, name)
