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
from lockstep.training.resolve import declares_task, locate, located, resolve, short_name
from tests.refused import refused

GOOD = """
from beside import SAMPLES
from tests.training import toy

class Own:
    pass

def task(lr: float = 0.5, samples: int = SAMPLES):
    return toy.task(name=None, train_data=toy.data(samples, 1))
"""


HEAD = "import nothing_that_exists\n\n\n"


def write(folder: Path, text: str) -> str:
    file = folder / "resolved.py"
    file.write_text(text)
    return str(file)


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
    relative = f"{folder.name}/my_own.py"
    for name in (absolute, relative, f"./{folder.name}/../{relative}"):
        task = resolve(name, {"samples": "20"})
        assert (task.name, len(task.train_data)) == ("my_own", 20)  # type: ignore[arg-type]
    monkeypatch.chdir(folder)
    assert resolve("my_own.py").name == "my_own"
    assert locate("my_own.py") == absolute
    made = sys.modules["my_own"].Own()
    assert isinstance(pickle.loads(pickle.dumps(made)), sys.modules["my_own"].Own)


def test_a_file_may_be_called_like_a_module_or_like_none(folder: Path) -> None:
    for name in ("random.py", "this.py", "my-task.py", "pytest.py", "2.py"):
        (folder / "my_own.py").rename(folder / name)
        known = sys.modules.get(Path(name).stem)
        assert resolve(str(folder / name)).name == Path(name).stem
        assert sys.modules.get(Path(name).stem) is known
        (folder / name).rename(folder / "my_own.py")


def test_a_name_or_a_path_that_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name, known in (
        ("digit", "digits, text (did you mean 'digits'?)"),
        ("resnet", "digits, text"),
        ("my_own", "digits, text (did you mean 'my_own.py'?)"),
    ):
        with refused("unknown-task", TaskError, task=name, known=known):
            locate(name)
    for name, problem in (
        ("nowhere.py", "does not exist (looked from /"),
        ("./nowhere", "does not exist"),
        ("/tmp", "is a folder"),
    ):
        with refused("task-file-missing", TaskError, task=name) as caught:
            locate(name)
        assert caught.value.values["problem"].startswith(problem)


def test_a_file_without_a_task(tmp_path: Path) -> None:
    for text, code, values in (
        ("x = 1", "task-function-missing", {"found": "not defined"}),
        ("task = 3", "task-function-missing", {"found": "a int"}),
        ("def task(): pass", "wrong-return-type", {"type": "NoneType"}),
        ("def task(): return {'model': 1}", "wrong-return-type", {"type": "dict"}),
        ("def task(lr): pass", "task-argument-missing", {"key": "lr"}),
    ):
        with refused(code, TaskError, **values) as caught:
            resolve(write(tmp_path, text))
        assert str(tmp_path / "resolved.py") in str(caught.value)


def test_the_users_own_exception_comes_through(tmp_path: Path) -> None:
    for text, error in (
        ("import no_such_module", ModuleNotFoundError),
        ("def task(: pass", SyntaxError),
        ("def task():\n    return 1 / 0", ZeroDivisionError),
    ):
        file = write(tmp_path, text)
        with pytest.raises(error) as raised:
            resolve(file)
        frames = [str(entry.path) for entry in raised.traceback]
        assert file in frames or error is SyntaxError
        assert not any("importlib" in frame for frame in frames)
        assert ("resolved" in sys.modules) == (error is ZeroDivisionError)


def test_the_bundled_tasks_resolve() -> None:
    for name in ("digits", "text"):
        task = resolve(name, {"seed": "5"})
        assert isinstance(task, Task)
        assert (task.name, task.seed) == (name, 5)
        assert located(name, {"lr": "0.1"}) == locate(name) == short_name(name) == name
        with refused("override-unknown", TaskError, key="rate"):
            located(name, {"rate": "1"})


def test_mistakes_that_show(tmp_path: Path) -> None:
    takes = {"key": "rate", "known": "it takes lr, width"}
    for text, overrides, code, values in (
        ("def task(:\n", {}, "not-python", {}),
        ("return 1\n", {}, "not-python", {}),
        (HEAD + "lr = 0.1\n", {}, "task-function-missing", {}),
        (HEAD + "def other():\n    def task(): ...\n", {}, "task-function-missing", {}),
        (HEAD + "def task(lr): ...\n", {}, "task-argument-missing", {"key": "lr"}),
        (HEAD + "def task(lr=1, *, width=8): ...\n", {"rate": "1"}, "override-unknown", takes),
    ):
        with refused(code, TaskError, **values) as refusal:
            located(write(tmp_path, text), overrides)
        assert code != "not-python" or "line 1" in str(refusal.value)
    either = "a whole number or a number or none"
    for annotated, value, choices in (
        ("n=0.1", "fast", "a number"),
        ("n: Literal['a', 'b'] = 'a'", "c", "a or b"),
        ("n: 'int | None' = None", "wide", "a whole number or none"),
        ("n: typing.Union[int, float, None] = None", "wide", either),
        ("n: Optional['Literal[-1, 8]'] = None", "7", "-1 or 8 or none"),
    ):
        path = write(tmp_path, HEAD + f"def task({annotated}): ...\n")
        with refused("override-wrong-value", TaskError, key="n", value=value, choices=choices):
            located(path, {"n": value})


def test_what_does_not_show_is_left_to_the_run(tmp_path: Path) -> None:
    for text, overrides in (
        ("def task(lr=0.1, width: int | None = None): ...\n", {"lr": "1e-3", "width": "none"}),
        ("from elsewhere import task\n", {"rate": "1"}),
        ("from elsewhere import *\n", {}),
        ("task = make()\n", {"rate": "1"}),
        ("@decorated\ndef task(): ...\n", {"rate": "1"}),
        ("if here:\n    def task(): ...\nelse:\n    def task(rate): ...\n", {"rate": "1"}),
        ("def make():\n    global task\n    task = 1\n", {}),
        ("globals()['task'] = make\n", {}),
        ("def task(kind: Kind = 1, rate=compute()): ...\n", {"kind": "any", "rate": "any"}),
    ):
        path = write(tmp_path, HEAD + text)
        assert located(path, overrides) == path


def test_no_annotation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power of this size would be computed for longer than a test may take."""
    monkeypatch.chdir(tmp_path)
    for annotation in (
        "typing.sys.modules['os'].mkdir('ran')",
        "\"typing.sys.modules['os'].mkdir('ran')\"",
        "typing.Literal[typing.sys.modules['os'].mkdir('ran')]",
        "int | int.__subclasses__()[0]",
        "9 ** 9 ** 9 ** 9",
        "Optional[9 ** 9 ** 9 ** 9]",
        "'('",
        "list[int]",
    ):
        path = write(tmp_path, HEAD + f"def task(n: {annotation} = 1): ...\n")
        assert located(path, {"n": "any"}) == path
        assert not (tmp_path / "ran").exists()


def test_whether_a_file_declares_a_task(tmp_path: Path) -> None:
    assert declares_task(Path(write(tmp_path, "def task(): ...\n")))
    assert not declares_task(Path(write(tmp_path, "class A:\n    def task(self): ...\n")))
