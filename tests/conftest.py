"""The two tiers of tests, how they share workers, and what holds for every test."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch.distributed as dist

from lockstep.launcher import start
from lockstep.testing.ranks import run_ranks, warm_commands
from tests import leaks, teams
from tests.launcher.telling import of_itself

if getattr(main := sys.modules["__main__"], "__spec__", None) is None and not hasattr(
    main, "__file__"
):
    # a worker of pytest-xdist: as pytest itself, and no notebook
    main.__spec__ = importlib.util.find_spec("pytest.__main__")

# A user's ranks have a minute. A loaded machine may take longer, and what hangs here is ended by
# the limit of its test.
run_ranks.__defaults__ = ((), None, timedelta(days=1))

# how long an example takes is the machine's affair
hypothesis.settings.register_profile("lockstep", deadline=None)
hypothesis.settings.load_profile("lockstep")

# Scripts and tasks of tests import from `tests`. A command with another path than the warm server's
# would import torch again.
_PATHS = [
    str(Path(__file__).parents[1]),
    *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_PATHS))
# each worker of pytest-xdist, and each rank, would compile the tests again
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Read as torch is loaded. OpenMP's threads would spin where they wait for each other, and here
# others need the cores: with three test processes on two cores a small training in a test's own
# process took ten times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# of a quiet host: commands warn of a busy one
os.environ["LOCKSTEP_LOADAVG"] = str(Path(__file__).parent / "loadavg")

_WORKERS = 3  # on two cores
_OFTEN_IMPORTED = (
    "lockstep.model_parallel.split_model",
    "lockstep.collectives.api",
    "lockstep.data.iterable.stream_loader",
    "torch.profiler._cupti_monitor",
    "torchmetrics",
)
# files of which one test takes long: begun last, it would have a core to itself at the end
_FIRST = (
    "test_ports.py",
    "docs/test_readme.py",
    "docs/test_how_to.py",
    "integrations/ray_cluster/test_driver.py",
    "integrations/test_ray_train.py",
    "docs/test_course.py",
    "docs/test_site.py",
    "contract/test_torch_c10d.py",
    "promises/test_same_gradients.py",
    "launcher/slurm/test_jobs.py",
    "simulation/test_checkpoints.py",
    "cli/test_preemption.py",
)
_FILE_SECONDS = 20.0
_seconds: Counter[str] = Counter()
"""How long the tests of a file took."""
_CLEARING_SECONDS = 120.0  # for the fixtures of a test, at its end
_AGAIN_SECONDS = 30.0  # until what was interrupted, and goes on waiting, is interrupted once more


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests that are marked `rest` too")


def _fast_tier(config: pytest.Config) -> bool:
    """Whether tests that are marked `rest` are left out. A file that is named runs whole."""
    files = [argument.partition("::")[0] for argument in config.args]
    return not (config.option.all or all(file.endswith(".py") for file in files))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import a file that the fast tier leaves out as a whole."""
    if _fast_tier(config) and collection_path.name.startswith("test_"):
        return "\npytestmark = pytest.mark.rest\n" in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Tests mostly wait: a run of more than one file has three workers, and each file is in one
    of them. -n and --dist have their way.
    """
    option = config.option
    if (
        hasattr(config, "workerinput")
        or getattr(option, "numprocesses", 0) is not None
        or option.dist != "no"
    ):
        return  # a worker, no pytest-xdist, or somebody has chosen
    files = {argument.partition("::")[0] for argument in config.args}
    alone = len(files) == 1 and files.pop().endswith(".py")
    if not (alone or option.usepdb or option.capture == "no" or option.collectonly):
        option.numprocesses, option.dist, option.loadscopereorder = _WORKERS, "loadfile", False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files are first, all others as pytest-randomly has them. Workers of pytest-xdist take
    files in this order.
    """
    if _fast_tier(config):
        rest = [item for item in items if item.get_closest_marker("rest")]
        items[:] = [item for item in items if not item.get_closest_marker("rest")]
        config.hook.pytest_deselected(items=rest)
    first = {Path(__file__).parent / name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[object]:
    """`run_ranks`, teams, and commands that tests start, import nothing: their ranks are forked
    from one server.
    """
    if session.config.option.collectonly or session.config.pluginmanager.hasplugin("dsession"):
        return (yield)  # other processes run the tests
    import torch._dynamo  # noqa: F401 - the first optimizer imports it, and it sets environment variables: not to be blamed on a test

    _signals_as_in_a_terminal()
    with warm_commands(_OFTEN_IMPORTED):
        start.fork_server().ready()
        done = yield
        try:
            forked, *_ = json.loads(start.fork_server().answer(of_itself))
        except start.ServerGone as error:  # the next test would have started another one
            print(f"{error} (caused by {error.__cause__!r})", file=sys.__stderr__, flush=True)
        else:
            assert forked, "what a test made the warm server import has made all later starts cold"
    return done


def _signals_as_in_a_terminal() -> None:
    """Under nohup and in a shell's background some are ignored, and every process that a test
    starts would ignore them too.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            )


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Iterator[object]:
    """pytest-timeout interrupts a test once. One that waits again while it is unwound, as `with
    Popen(...)` does, is interrupted again.
    """
    done = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN_SECONDS)
    return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[object]:
    """pytest-timeout stops its timer at a failure, so a fixture's end could wait for ever: it
    has a limit of its own.
    """
    handler = signal.signal(signal.SIGALRM, _too_long)
    timer = signal.setitimer(signal.ITIMER_REAL, _CLEARING_SECONDS, _AGAIN_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _too_long(number: int, frame: object) -> None:
    pytest.fail(f"a fixture has not cleared away what it made within {_CLEARING_SECONDS:.0f} s")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once, and not only at the end: who ends a run before its end wants to
    know too.
    """
    _seconds[report.nodeid.partition("::")[0]] += report.duration
    if report.failed:
        header = f"{report.nodeid} ({report.when}, {report.duration:.1f} s)"
        sys.__stdout__.write(f"\n{header}\n{report.longreprtext}\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


def _slow_files(config: pytest.Config, times: int = 1) -> list[str]:
    """Return the files that take `times` as long as a file of the fast tier may, if this was a
    whole run of it. A slower machine has more time: 1/45 of all files' seconds, if that is more.
    """
    if config.args != config.getini("testpaths") or config.option.all:
        return []
    limit = max(_FILE_SECONDS, _seconds.total() / 45)
    return [
        f"{file}: {seconds:.0f} s of the {limit:.0f} s that a file of the fast tier may take"
        for file, seconds in _seconds.most_common()
        if seconds > times * limit
    ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in _slow_files(config):
        terminalreporter.write_line(line, yellow=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A file that takes three times as long fails the run: with less, other programs may be why."""
    if session.exitstatus == pytest.ExitCode.OK and _slow_files(session.config, times=3):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def unknown_names() -> Iterator[None]:
    """Names under .invalid are unknown at once: a resolver that cannot be reached would be asked
    for half a minute.
    """
    look_up = socket.getaddrinfo

    def known(host: Any, *args: Any, **options: Any) -> Any:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", known)
        yield


@pytest.fixture(scope="module", autouse=True)
def teams_of_the_module() -> Iterator[None]:
    yield
    teams.close_teams()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fail the test that leaves something behind, naming it."""
    try:
        with leaks.nothing_left(_servers):
            yield
    except leaks.LeftBehind as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        pytest.fail(str(error), pytrace=False)


def _servers() -> set[int]:
    """Return the processes that stay for the session: what forks ranks, and multiprocessing's own.
    The ranks of teams stay for the module.
    """
    return {
        *start.pids(),
        *teams.pids(),
        multiprocessing.forkserver._forkserver._forkserver_pid,
        multiprocessing.resource_tracker._resource_tracker._pid,
    }
