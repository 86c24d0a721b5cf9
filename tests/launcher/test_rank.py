"""One rank's process: the target runs as plain Python would run it, and its failure goes into a
record and nowhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import zipfile
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import pytest

from lockstep.errors import UsageError
from lockstep.launcher import failures, server
from lockstep.launcher.rank import Rank, Target
from lockstep.launcher.seat import Seat

_DESCRIBE = (
    "import os, sys\nprint([sys.argv, sys.path[0], __name__, sys.modules['__main__'].__dict__ is"
    " globals()])\n"
)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def _rank(
    cwd: Path,
    *args: str,
    records: Path | None = None,
    environment: dict[str, str] | None = None,
    cold: bool = False,
) -> Done:
    """Rank 1 runs `[-m] target args`, forked from a warm server or as a fresh interpreter."""
    env = {**os.environ, "RANK": "1", **(environment or {})}
    with ExitStack() as at_end:
        at_end.enter_context(chdir(cwd))
        records = records or Path(at_end.enter_context(TemporaryDirectory()))
        target = (
            Target(module=args[1], args=args[2:])
            if args[0] == "-m"
            else Target(script=args[0], args=args[1:])
        )
        out, err = (at_end.enter_context(TemporaryFile("w+")) for _ in range(2))
        forking = server.server(environment=env, cold=cold)
        seat = Seat(
            work=Rank(rank=1, work=target, records=str(records)),
            environment={**env, failures.DIRECTORY: str(records)},
        )
        pid = forking.fork(seat, (0, out.fileno(), err.fileno()), cold=cold, beside=target.beside())
        while (code := forking.code(pid)) is None:
            forking.wait(1)
        forking.release(pid)
        for stream in (out, err):
            stream.seek(0)
        return Done(code, out.read(), err.read())


def _plain(cwd: Path, *args: str, environment: dict[str, str] | None = None) -> str:
    env = {**os.environ, **(environment or {})}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder with the same description as a script, a package, a folder and an archive."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "package").mkdir()
    for file in ("sub/script.py", "package/module.py", "package/__main__.py", "sub/__main__.py"):
        (tmp_path / file).write_text(_DESCRIBE)
    (tmp_path / "link.py").symlink_to("sub/script.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", _DESCRIBE)
    return tmp_path


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("script", ["sub/script.py", "link.py", "sub", "archive.zip"])
def test_a_script_sees_what_plain_python_shows_it(target: Path, script: str, cold: bool) -> None:
    done = _rank(target, script, "-x", "--", "a b", records=target, cold=cold)
    assert done.stderr == ""
    # sys.argv[0] of a folder or an archive is absolute here
    named = script if script.endswith(".py") else str(target / script)
    assert done.stdout == _plain(target, named, "-x", "--", "a b")


@pytest.mark.parametrize("module", ["package.module", "package"])
def test_a_module_sees_what_plain_python_shows_it(target: Path, module: str) -> None:
    done = _rank(target, "-m", module, "-x")
    assert done.stderr == ""
    assert done.stdout == _plain(target, "-m", module, "-x")


def test_a_safe_path_stays_safe(target: Path) -> None:
    safe = {"PYTHONSAFEPATH": "1"}
    assert _rank(target, "sub/script.py", environment=safe).stdout == _plain(
        target, "sub/script.py", environment=safe
    )


def _fail(tmp_path: Path, text: str, **environment: str) -> tuple[Done, list[failures.Failure]]:
    (tmp_path / "script.py").write_text(textwrap.dedent(text))
    done = _rank(tmp_path, "script.py", records=tmp_path, environment=environment)
    return done, failures.read_all(tmp_path)


def test_an_exception_goes_into_the_record_and_is_not_printed(tmp_path: Path) -> None:
    done, (record,) = _fail(tmp_path, "print('before', end='')\nraise ValueError('boom')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "before", "")
    assert (record.rank, record.kind, record.message) == (1, "exception", "ValueError: boom")
    assert record.traceback.splitlines()[1] == '  File "script.py", line 2, in <module>'


def test_a_failure_leaves_at_once_though_threads_live_on(tmp_path: Path) -> None:
    done, (record,) = _fail(
        tmp_path,
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\nraise"
        " ValueError('boom')",
    )
    assert (done.returncode, record.message) == (1, "ValueError: boom")


def test_a_usage_error_is_2_with_the_users_line(tmp_path: Path) -> None:
    done, (record,) = _fail(
        tmp_path, "from lockstep.errors import UsageError\n\nraise UsageError('x=1: no')"
    )
    assert (done.returncode, record.kind, record.message, record.where) == (
        2,
        "usage",
        "x=1: no",
        "script.py:3",
    )


@pytest.mark.parametrize(("argument", "code", "message"), [("3", 3, ""), ("'sorry'", 1, "sorry")])
def test_exits_pass_through(tmp_path: Path, argument: str, code: int, message: str) -> None:
    done, (record,) = _fail(tmp_path, f"import sys; sys.exit({argument})")
    assert (done.returncode, done.stderr, record.kind, record.code, record.message) == (
        code,
        "",
        "exit",
        code,
        message,
    )


def test_the_line_of_an_exit_is_known(tmp_path: Path) -> None:
    _, (record,) = _fail(tmp_path, "import sys\n\nsys.exit(3)")
    assert record.where == "script.py:3"
    assert "exited with code 3 (script.py:3)" in failures.summary(record)


@pytest.mark.parametrize("end", ["", "import sys; sys.exit()", "import sys; sys.exit(0)"])
def test_a_good_end_leaves_no_record_and_runs_exit_handlers(tmp_path: Path, end: str) -> None:
    done, records = _fail(tmp_path, f"import atexit; atexit.register(print, 'bye')\n{end}")
    assert (done.returncode, done.stdout, done.stderr, records) == (0, "bye\n", "", [])


def test_an_interrupt_is_130(tmp_path: Path) -> None:
    done, _ = _fail(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert done.returncode == 130


def test_a_fatal_signal_leaves_the_stack(tmp_path: Path) -> None:
    done, records = _fail(tmp_path, "import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()")
    assert (done.returncode, done.stderr, records) == (-11, "", [])
    assert 'File "script.py", line 3 in crash' in (tmp_path / "rank-1.stack").read_text()


@pytest.mark.parametrize("module", ["nowhere", "nowhere.at.all", "json.nowhere", "email"])
def test_a_module_that_cannot_run_is_a_usage_error(tmp_path: Path, module: str) -> None:
    done = _rank(tmp_path, "-m", module, records=tmp_path)
    (record,) = failures.read_all(tmp_path)
    assert (done.returncode, record.kind) == (2, "usage")
    assert record.message.startswith(f"module {module!r} cannot be found from {tmp_path}")
    assert UsageError(record.message).code == "module-not-found"


def test_an_import_error_of_the_users_module_stays_an_exception(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import not_installed_anywhere")
    done = _rank(tmp_path, "-m", "broken", records=tmp_path)
    (record,) = failures.read_all(tmp_path)
    assert (done.returncode, record.kind) == (1, "exception")
    assert "not_installed_anywhere" in record.message
