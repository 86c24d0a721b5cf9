"""`python -m lockstep.launcher.worker`: one rank of `lockstep run` or `lockstep train`, around the user's script or module.

It runs the target as `__main__`, with the sys.argv and sys.path that plain Python would give it, and ends as Python does; with Lockstep's
own commands nearly so (`_end`). When the target fails, the reason goes into a record that the launcher reads, and the process ends at
once: threads of a communication library must not keep it, and nothing may be printed that the launcher prints better. Started by hand,
without a launcher, it fails as Python does.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import gc
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from lockstep import status
from lockstep.errors import ExitCode, UsageError
from lockstep.launcher import alone, asked, debug, ending, failures, logs, processes, stalls
from lockstep.launcher.agent_environment import SIGNALS
from lockstep.launcher.private import sockets_into
from lockstep.orphans import die_with_launcher


def main(argv: list[str] | None = None) -> None:
    """Run the target that `argv` names; returns only if it ended well."""
    die_with_launcher()
    os.environ.pop(SIGNALS, None)  # the launcher's business, not the target's
    options = _parse(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ.get("RANK", "0"))
    records = os.environ.get(failures.DIRECTORY)
    if options.heeds:
        asked.listen()
    if options.debug and options.logs is not None:
        debug.switch_on(rank, options.logs)
    logs.redirect(rank, options.console, options.logs, pipes=options.pipes, c_to_log=options.debug)
    if records is None:
        _run(options)
        return
    sockets_into(Path(records))
    status.open_page(Path(records), rank)
    processes.stacks_into(stalls.stack_of(Path(records), rank))
    faulthandler.enable(processes.written_to(Path(records) / f"rank-{rank}.stack"))
    try:
        _run(options)
    except BaseException as error:
        failure = failures.of_exception(error, rank)
        if type(error) is SystemExit and _of_ours(options):
            failure = failures.of_exit_inside(error, rank)
        elif failure.kind == "exit" and failure.code == ExitCode.OK:
            _over(Path(records), rank)
            raise
        failures.write(failure, Path(records))
        _leave(failure.code)
    _over(Path(records), rank)
    if _of_ours(options):
        _end()


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lockstep.launcher.worker", allow_abbrev=False)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--script", help="a Python file, run as __main__")
    target.add_argument("--module", help="a module, run as __main__")
    parser.add_argument("--console", choices=("first", "all", "joined"), default="all", help="which ranks write to the terminal")
    parser.add_argument("--heeds", action="store_true", help="note SIGTERM and SIGUSR1 from now on: the target asks whether they came")
    parser.add_argument("--pipes", type=Path, help="for --console joined: where the launcher listens")
    parser.add_argument("--logs", type=Path, help="a directory for rank-N.log")
    parser.add_argument("--debug", action="store_true", help="have libraries and collectives write to rank-N.log what they do")
    parser.add_argument("args", nargs="*", help="after --: the target's own arguments")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace) -> None:
    if options.script is not None:
        _run_script(options.script, options.args)
    else:
        _run_module(options.module, options.args)


def _run_script(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    if pkgutil.get_importer(script) is None:
        _look_first_in(os.path.dirname(os.path.realpath(script)))
    else:  # a folder or an archive with __main__.py; runpy puts it on the path as it is named
        script = os.path.abspath(script)
    runpy.run_path(script, run_name="__main__")


def _run_module(module: str, args: list[str]) -> None:
    _look_first_in(os.getcwd())
    if not _exists(module):
        raise UsageError(f"module {module!r} cannot be found from {os.getcwd()}, or is a package without __main__.py")
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _look_first_in(folder: str) -> None:
    """As Python does. The launcher passes -P, so that until here nothing in the user's folder can stand in for a library."""
    if not os.environ.get("PYTHONSAFEPATH"):
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


def _of_ours(options: argparse.Namespace) -> bool:
    """Whether the target is one of Lockstep's own commands, which calls the user's functions and has no sys.exit."""
    return options.module is not None and options.module.startswith("lockstep.")


def _over(records: Path, rank: int) -> None:
    """The target has ended well. Python still waits for what it has left running."""
    alone.note_groups()
    status.enter("end")
    ending.announce_to_launcher(records, rank)


def _end() -> NoReturn:
    """As Python ends, but for taking modules apart: threads of a communication library that are still alive would abort that."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the target's threads, as multiprocessing does for its processes'
    atexit._run_exitfuncs()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):  # files that were left open: what was written to them is kept
            with suppress(Exception):
                each.flush()
    _leave(ExitCode.OK)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
