"""One rank's process: the target runs as plain Python would run it, and its failure goes into a
record and nowhere else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from contextlib import ExitStack, chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import pytest

from lockstep.config.launching import Launch
from lockstep.errors import PeerFailed, UsageError
from lockstep.launcher import failures, start
from lockstep.launcher.rank import Rank, Target, rank_here, refuse_watching, report_of
from lockstep.runtime import failure_record
from lockstep.runtime.environment import placement
from tests.launcher.commands import python
from tests.refused import refused

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
    address = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    env = {**os.environ, **address, **(environment or {})}
    with ExitStack() as stack:
        stack.enter_context(chdir(cwd))
        records = records or Path(stack.enter_context(TemporaryDirectory()))
        target = (
            Target(module=args[1], args=args[2:])
            if args[0] == "-m"
            else Target(script=args[0], args=args[1:])
        )
        out, err = (stack.enter_context(TemporaryFile("w+")) for _ in range(2))
        server = start.fork_server(environment=env, cold=cold)
        pid = server.fork(
            Rank(rank=1, work=target, records=str(records)),
            environment={**env, failure_record.DIRECTORY: str(records)},
            streams=(0, out.fileno(), err.fileno()),
            beside=target.beside(),
        )
        while (code := server.codes([pid])[pid]) is None:
            server.wait(1)
        server.release(pid)
        for stream in (out, err):
            stream.seek(0)
        return Done(code, out.read(), err.read())


def _plain(cwd: Path, *args: str, **variables: str) -> str:
    done = python(*args, cwd=cwd, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_a_program_sees_what_plain_python_shows_it(target: Path, cold: bool) -> None:
    scripts = ("sub/script.py", "link.py", "sub", "archive.zip")
    for program in (*scripts, "-m package.module", "-m package"):
        *option, name = program.split()
        done = _rank(target, *option, name, "-x", "--", "a b", records=target, cold=cold)
        assert done.stderr == ""
        if name in ("sub", "archive.zip"):
            name = str(target / name)  # sys.argv[0] of a folder or an archive is absolute here
        assert done.stdout == _plain(target, *option, name, "-x", "--", "a b"), program


@pytest.mark.rest
def test_a_safe_path_stays_safe(target: Path) -> None:
    safe = {"PYTHONSAFEPATH": "1"}
    done = _rank(target, "sub/script.py", environment=safe)
    assert done.stdout == _plain(target, "sub/script.py", **safe)


def _fail(tmp_path: Path, text: str) -> tuple[Done, list[failure_record.Failure]]:
    (tmp_path / "script.py").write_text(text)
    done = _rank(tmp_path, "script.py", records=tmp_path)
    return done, failures.read_all(tmp_path)


def test_an_exception_goes_into_the_record_at_once_and_is_not_printed(tmp_path: Path) -> None:
    thread = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    done, (record,) = _fail(tmp_path, thread + "print('said', end='')\nraise ValueError('boom')")
    assert (done.returncode, done.stdout, done.stderr) == (1, "said", "")
    assert (record.rank, record.kind, record.message) == (1, "exception", "ValueError: boom")
    assert record.traceback.splitlines()[1] == '  File "script.py", line 4, in <module>'
    text = "from lockstep.errors import UsageError\n\nraise UsageError('x=1: no')"
    done, (record,) = _fail(tmp_path, text)
    assert (done.returncode, record.kind, record.message) == (2, "usage", "x=1: no")
    assert record.user_line == "script.py:3"


def test_a_good_end_leaves_no_record_and_runs_exit_handlers(tmp_path: Path) -> None:
    for end in ("", "import sys; sys.exit()", "import sys; sys.exit(0)"):
        done, records = _fail(tmp_path, f"import atexit; atexit.register(print, 'bye')\n{end}")
        assert (done.returncode, done.stdout, done.stderr, records) == (0, "bye\n", "", [])


def test_a_module_that_cannot_run_is_a_usage_error_and_one_that_fails_is_none(
    tmp_path: Path,
) -> None:
    for module in ("nowhere", "nowhere.at.all", "json.nowhere", "email"):
        done = _rank(tmp_path, "-m", module, records=tmp_path)
        (record,) = failures.read_all(tmp_path)
        assert (done.returncode, record.kind) == (2, "usage")
        assert record.message.startswith(f"module {module!r} cannot be found from {tmp_path}")
        assert UsageError(record.message).code == "module-not-found"
    (tmp_path / "broken.py").write_text("import not_installed_anywhere")
    done = _rank(tmp_path, "-m", "broken", records=tmp_path)
    (record,) = failures.read_all(tmp_path)
    assert (done.returncode, record.kind) == (1, "exception")
    assert "not_installed_anywhere" in record.message


RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "ENVIRONMENT": "BATCH"}


def _set(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_who_is_a_rank_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_here(None) is None
    with monkeypatch.context() as patch:
        _set(patch, {"RANK": "0", "WORLD_SIZE": "1"})
        assert rank_here("4") is None, "alone it is a launcher"
    with monkeypatch.context() as patch:
        _set(patch, BATCH)
        with refused("batch-script-shell", expected=2):
            rank_here(None)
        assert rank_here("2") is None, "in a batch script's shell the number must be meant"
    _set(monkeypatch, RANK)
    same: tuple[str | int | None, ...] = (None, "2", 2)
    for workers in same:
        assert rank_here(workers) == placement(RANK)
    others: tuple[str | int, ...] = ("3", "1:2", 4)
    for other in others:
        values = {"workers": other, "size_name": "WORLD_SIZE", "size": 2, "rank": 1}
        with refused("workers-differ-from-launcher", **values):
            rank_here(other)


def test_what_only_a_launcher_of_ours_can_do_is_refused() -> None:
    place = placement(RANK)
    assert place is not None
    refuse_watching(place, Launch(timeout=5))
    for launch in (
        Launch(debug=True),
        Launch(cold=True),
        Launch(bind="none"),
        Launch(on_stall="wait"),
        Launch(stall_after=5),
        Launch(max_restarts=1),
    ):
        with refused("options-of-a-launcher", source="RANK and WORLD_SIZE", rank=1, size=2):
            refuse_watching(place, launch)


def test_what_a_rank_says() -> None:
    def of(error: BaseException, rank: int = 1) -> str:
        return report_of(failure_record.of_exception(error, rank))

    assert of(UsageError("x=1: give 2")) == "error (rank 1): x=1: give 2\n"
    assert of(UsageError("x=1: give 2"), rank=0) == "error: x=1: give 2\n"
    assert of(SystemExit(75)) == ""
    gone = of(PeerFailed("rank 0 has gone"))
    assert gone.startswith("rank 1 (pid ")
    assert gone.endswith("failed: PeerFailed: rank 0 has gone\n")
    assert gone.count("\n") == 1
    lines = of(ValueError("bad")).splitlines()
    assert lines[0] == "ValueError: bad"
    assert lines[-1].endswith("failed: ValueError: bad")


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")  # as scripts for torchrun do: from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
total = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(total)
if os.environ["LOCAL_RANK"] == "1":
    raise ArithmeticError(f"{total.item():g} {' '.join(sys.argv[1:])}")
sys.exit(3)
"""


def test_a_script_for_torchrun_as_tasks_of_a_step(tmp_path: Path) -> None:
    """What srun would do: the same command with other numbers. tests/launcher/slurm has the real
    one.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    command = [sys.executable, "-m", "lockstep", "run", str(script), "--lr", "1"]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    errors = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 1], errors
    assert errors[0] == ""
    assert "lockstep" not in errors[1].replace(str(tmp_path), "")
    assert errors[1].splitlines()[-1].endswith("failed: ArithmeticError: 3 --lr 1")


REDUCER = """
import functools, sys, weakref
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
# a function of this module would keep all of the module
sys.kept = weakref.ref(model.reducer, functools.partial(print, "freed", flush=True))
model(torch.ones(2)).sum().backward()
dist.destroy_process_group()
print("over")
"""


def test_torchs_reducer_is_not_freed_at_the_end_as_that_may_wait_without_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(REDUCER)
    done = _rank(tmp_path, "script.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["over"]
