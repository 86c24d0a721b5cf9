"""One rank, around the user's script, module or function: what its process does from start to end.

The target runs as `__main__`, with the sys.argv and sys.path that plain Python would give it, and
ends as Python does, or nearly so (`_end`). If it fails, the rank writes the reason into a record
that the launcher reads, and the process ends at once. Threads of a communication library must not
keep it alive, and it must not print what the launcher prints better.
"""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import gc
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from typing import NoReturn, Protocol

from lockstep.config.launching import Launch
from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import (
    ending,
    failures,
    logs,
    torch_calls,
    torch_rendezvous,
)
from lockstep.launcher.fork_server import flags
from lockstep.launcher.logs import Console
from lockstep.launcher.script_replicas import ScriptReplicas
from lockstep.runtime import binding, launched, preemption, processes, status
from lockstep.runtime.disk import write_all
from lockstep.runtime.environment import Placement, started_by_others
from lockstep.runtime.failure_record import Failure, of_exception, rank_file, write
from lockstep.runtime.private import sockets_into


class Program(Protocol):
    """What a rank runs."""

    @property
    def ours(self) -> bool:
        """Whether it is Lockstep's own program, which calls the user's functions and never
        sys.exit.
        """

    def beside(self) -> Sequence[str]:
        """Return the names of the modules in its folder, which comes first on its path."""

    def run(self, *descriptors: int) -> None:
        """Run it in this process. The launcher has passed on these descriptors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What every rank runs as `__main__`: a script or a module, with arguments."""

    script: str | None = None
    module: str | None = None
    args: Sequence[str] = ()
    task: str | None = None
    """For one of Lockstep's own modules: the user's file that it loads."""
    check_replicas: bool = False
    """Whether the weights that the ranks train are compared."""

    def __post_init__(self) -> None:
        if (self.script is None) == (self.module is None):
            raise UsageError("script-or-module", script=self.script, module=self.module)
        if self.script is not None and not Path(self.script).exists():
            raise UsageError("script-not-found", script=self.script, folder=os.getcwd())

    @property
    def ours(self) -> bool:
        return self.module is not None and self.module.startswith("lockstep.")

    def beside(self) -> Sequence[str]:
        if self.ours:
            is_file = self.task is not None and self.task.endswith(".py")
            return modules_in(Path(self.task or "")) if is_file else ()
        return modules_in(Path.cwd() if self.script is None else Path(self.script).resolve())

    def run(self, *descriptors: int) -> None:
        torch_rendezvous.be_launched_for_libraries()
        replicas = ScriptReplicas() if self.check_replicas else None
        try:
            if self.script is not None:
                self._run_script(self.script)
            else:
                self._run_module(self.module or "")
        except SystemExit as ended:
            if replicas is not None and not ended.code:
                replicas.compare_at_end()
            raise
        if replicas is not None:
            replicas.compare_at_end()

    def _run_script(self, script: str) -> None:
        _set_arguments([script, *self.args])
        if pkgutil.get_importer(script) is None:
            _look_first_in(os.path.dirname(os.path.realpath(script)))
            _run_file(script)
        else:  # a folder or an archive with __main__.py; runpy puts it on the path as it is named
            runpy.run_path(os.path.abspath(script), run_name="__main__")

    def _run_module(self, module: str) -> None:
        _look_first_in(os.getcwd())
        if not _exists(module):
            raise UsageError("module-not-found", module=module, folder=os.getcwd())
        _set_arguments([module, *self.args], "-m")
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_arguments(arguments: list[str], *option: str) -> None:
    sys.argv = arguments
    sys.orig_argv = [sys.executable, *flags(), *option, *arguments]


def _run_file(script: str) -> None:
    """Run the file as `__main__` until the process ends. runpy would restore the old `__main__`
    after the last line, before the program's threads and exit functions are done.
    """
    file = os.path.abspath(script)
    main = types.ModuleType("__main__")
    if file.endswith(".pyc"):
        sourceless = SourcelessFileLoader("__main__", file)
        main.__loader__ = sourceless
        code = sourceless.get_code("__main__")
    else:
        source = SourceFileLoader("__main__", file)
        main.__loader__ = source
        code = compile(source.get_data(file), script, "exec", dont_inherit=True)
    assert code is not None
    main.__dict__.update(__file__=file, __cached__=None, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def modules_in(path: Path) -> Sequence[str]:
    """Return the names under which the contents of a folder (or of a file's folder) can be
    imported.
    """
    names = []
    with suppress(OSError):
        for entry in os.scandir(path if path.is_dir() else path.parent):
            if entry.name.endswith((".py", ".so")) or Path(entry, "__init__.py").exists():
                names.append(entry.name.partition(".")[0])
    return names


def _look_first_in(folder: str) -> None:
    """Put `folder` first on sys.path, as Python does. This process was started with -P, so that
    until now no file in the user's folder could replace a library.
    """
    if not os.environ.get("PYTHONSAFEPATH") and not sys.flags.isolated:
        sys.path.insert(0, folder)


def _exists(module: str) -> bool:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return False
        raise
    if spec is not None and spec.submodule_search_locations is not None:
        return importlib.util.find_spec(f"{module}.__main__") is not None
    return spec is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """The work of a rank's process."""

    rank: int
    work: Program
    records: str
    """The launcher's directory for what ranks leave."""
    console: Console = "all"
    """Which ranks write to the terminal."""
    logs: Path | None = None
    """The directory for rank-N.log."""
    heeds: bool = False
    """Whether to note SIGTERM and SIGUSR1 from the start: the work asks whether they came."""
    debug: bool = False
    """Whether libraries and collectives log what they do in rank-N.log."""
    cores: Collection[int] = ()
    """The cores to bind the process to. Empty: it is not bound."""

    def __call__(self, *descriptors: int) -> NoReturn:
        """Run the rank until its process ends."""
        if self.cores:
            binding.bind(self.cores)
        processes.name_this(f"rank {self.rank}")
        records = Path(self.records)
        if self.heeds:
            preemption.listen()
        if self.debug and self.logs is not None:
            logs.switch_debug_on(self.rank, self.logs)
        logs.redirect(
            self.rank,
            self.console,
            self.logs,
            c_to_log=self.debug,
            escaped=self.work.ours,
        )
        sockets_into(records)
        status.open_page(records, self.rank)
        processes.stacks_into(processes.stack_of(records, self.rank))
        faulthandler.enable(processes.written_to(rank_file(records, self.rank, "stack")))
        torch_rendezvous.join_store_of(launched.remember_launcher(records))
        if not self.work.ours:
            torch_calls.install()
        try:
            self.work.run(*descriptors)
        except BaseException as error:
            failure = of_exception(error, self.rank, may_exit=not self.work.ours)
            if failure.kind == "exit" and failure.code == ExitCode.OK:
                self._over(records)
                error.__traceback__ = None  # the traceback keeps the program's objects alive
                _end()
            write(failure, records)
            _exit_now(failure.code)
        self._over(records)
        _end()

    def _over(self, records: Path) -> None:
        """Record that the target has ended well. Python still waits for what it left running."""
        ending.note_process_group()
        status.enter("end")
        ending.watch_end(partial(ending.write_report, records, self.rank))


def _end() -> NoReturn:
    """End the process as Python does, except that modules are not torn down.

    The teardown would abort if threads of a communication library are still alive. In a forked
    process it would also copy, page by page, the imports that all ranks share, only to free them.
    """
    # waits for the target's threads, as multiprocessing does in the processes that it starts
    threading._shutdown()  # type: ignore[attr-defined]
    _keep_operators()
    _kept = _reducers()  # until the process has ended
    atexit._run_exitfuncs()
    # before objects are collected, since a file's parts may be collected in any order
    _flush_files()
    sys.modules.pop("__main__", None)
    gc.collect()  # collects what the program has left, and runs its __del__
    _flush_files()
    _exit_now(ExitCode.OK)


def _keep_operators() -> None:
    """Keep torch's exit function from unregistering the operators that its modules have defined.
    That is half of a short rank's work, and copies shared pages as above.
    """
    unregister = getattr(sys.modules.get("torch.library"), "_del_library", None)
    if unregister is None:
        return
    for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        if finalizer.func is unregister:
            finalizer.atexit = False


def _reducers() -> list[object]:
    """Return the reducers of torch's DistributedDataParallel, so that they are not collected.

    A reducer that is freed joins gloo's threads, and holds the interpreter lock meanwhile. If such a
    thread has not yet dropped its last all-reduce, for which it needs that lock, none of them ends.
    That happens when ranks share cores.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    if module is None:
        return []
    wrapper = module.DistributedDataParallel
    wrappers = [value for value in gc.get_objects() if issubclass(type(value), wrapper)]
    return [getattr(value, "reducer", None) for value in wrappers]


def _flush_files() -> None:
    """Flush files that were left open, so that what was written to them is kept."""
    for value in gc.get_objects():
        if issubclass(type(value), io.IOBase):
            with suppress(Exception):
                value.flush()


def _exit_now(code: int) -> NoReturn:
    """Exit at once: threads of a communication library must not keep the process alive."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


# -- a command that torchrun, srun, mpirun or a cluster has started once for each rank -------------
#
# Here no launcher of Lockstep's reports in the end what went wrong. Every rank reports for itself:
# its own failure in full, and in one line what is only the consequence of another rank's failure.


def rank_here(workers: str | int | None) -> Placement | None:
    """Return this process's placement if another launcher has started it as one of several ranks.
    `workers` is the number that the command was given.

    Raises UsageError if `workers` differs from the launcher's number. It also raises it in a job's
    shell whose tasks were not started, unless `workers` is given.
    """
    try:
        placement = started_by_others(os.environ)
    except UsageError:
        if workers is not None:  # then this command starts them
            return None
        raise
    if placement is not None and workers is not None and str(workers) != str(placement.size):
        raise UsageError(
            "workers-differ-from-launcher",
            workers=workers,
            size_name=placement.source.split(" and ")[1],
            size=placement.size,
            rank=placement.rank,
        )
    return placement


def refuse_watching(placement: Placement, launch: Launch) -> None:
    """Raise UsageError if an option was given that needs Lockstep's launcher, which starts its
    ranks and watches them.
    """
    if replace(launch, timeout=None) != Launch():
        raise UsageError(
            "options-of-a-launcher",
            source=placement.source,
            rank=placement.rank,
            size=placement.size,
        )


def work_as(placement: Placement, work: Callable[[], object], *, may_exit: bool = True) -> None:
    """Do the rank's work. If it fails, the process reports that and ends at once, with the exit
    code that `lockstep run` would pass on.

    `may_exit`: the work is the user's own program, which may end with sys.exit(0).
    """
    terminal = os.dup(2)  # the work may redirect stderr
    try:
        work()
    except BaseException as error:
        failure = of_exception(error, placement.rank)
        if failure.code == ExitCode.OK and not may_exit:
            failure = of_exception(error, placement.rank, may_exit=False)
        if failure.code == ExitCode.OK:
            ending.watch_end_without_launcher(placement.rank)
            raise
        with suppress(OSError):
            write_all(terminal, report_of(failure).encode())
        _exit_now(failure.code)
    else:
        ending.note_process_group()
        if placement.rank == 0 and placement.size > 1 and not status.was_opened():
            write_all(terminal, f"{ending.never_joined(placement.size)}\n".encode())
        ending.watch_end_without_launcher(placement.rank)
    finally:
        os.close(terminal)


def report_of(failure: Failure) -> str:
    """Return a rank's report of its failure; "" for a sys.exit without a message."""
    if failure.kind == "exit" and not failure.message:
        return ""
    if failure.kind == "usage" and failure.rank:
        return f"error (rank {failure.rank}): {failure.message}\n"
    if failure.kind != "usage" and failure.standing == "consequence":
        return f"{failures.summary(failure)}\n"
    return f"{failures.render(failure)}\n"
