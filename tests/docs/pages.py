"""Runs the code blocks of a documentation page in order, in one empty folder.

The info string of a block's fence, and its first line, say what happens with it:

| block | what happens |
|---|---|
| any language, first line a comment that is a file name (`# train.py`) | it is written to that file |
| `python` | one Python process a page runs these blocks, as a notebook runs its cells |
| `sh` | `bash -e` runs it |
| `console` | each `$ command` is run and must print what stands under it |
| `text` directly after a `python` or `sh` block | it is what that block must print |
| other `text`, and `diff` | nothing |
| after a line `<!-- not run: reason -->` | nothing; `not_run` lists these |
| any other | an error |

A `lockstep` command that starts no ranks is run by a process that has imported torch: it would
import torch anew.

In what is printed, `...` stands for anything within a line, and a line `...` for any lines. stdout
and stderr are one, as on a terminal. A command must succeed, unless the next command of its block
is `$ echo $?`: then its exit code is what must stand there.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lockstep import launch
from lockstep.cli import main

ROOT = Path(__file__).parents[2]
SECONDS = 240.0  # for a command; what hangs is ended

_CODE = "echo $?"
_FENCE = re.compile(r"^ {0,3}(```+)\s*(\S*)[^\n]*$")
_STARTS_NO_RANKS = re.compile(
    r"lockstep (?:checkpoints|plan (?!.*--ray)|show|verify (?!.*--workers))[^|&;<>$*~]*"
)
_NOT_RUN = re.compile(r"^<!-- not run: (.+?) -->$")
_FILE = re.compile(r"^(?:#|//|--|;|<!--) ?([\w./-]*\w\.\w+|[\w./-]*Dockerfile)(?: -->)?$")
# A block's output goes where the process's own goes, so that other processes' lines are in it too.
_SESSION = """
import json, os, sys, traceback
jobs, answers = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
del sys.argv[1:]
sys.path.insert(0, "")
def _run(source, name):
    import linecache
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    try:
        exec(compile(source, name, "exec"), sys.modules["__main__"].__dict__)
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__.tb_next)
        return False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return True
for job in jobs:
    print(json.dumps(_run(*json.loads(job))), file=answers, flush=True)
"""


class PageFailed(AssertionError):
    """A block does not do what its page says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    page: str
    line: int  # of the fence
    language: str
    text: str
    not_run: str  # the reason, or ""
    follows: bool  # nothing but empty lines lies between it and the block before

    @property
    def file(self) -> str:
        """The name of the file that it is, or ""."""
        found = _FILE.match(self.text.partition("\n")[0])
        return found[1] if found else ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    found: list[Block] = []
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    reason, follows = "", False
    for number, line in lines:
        if fence := _FENCE.match(line):
            text = "".join(f"{each}\n" for each in _until(lines, fence[1], f"{name}:{number}"))
            found.append(
                Block(
                    page=name,
                    line=number,
                    language=fence[2],
                    text=text,
                    not_run=reason,
                    follows=follows,
                )
            )
            reason, follows = "", True
        elif said := _NOT_RUN.match(line.strip()):
            reason, follows = said[1], False
        elif line.strip():
            reason, follows = "", False
    return found


def _until(lines: Iterator[tuple[int, str]], fence: str, place: str) -> Iterator[str]:
    for _, line in lines:
        if line.strip() == fence:
            return
        yield line
    raise PageFailed(f"{place}: the block has no end")


def not_run(page: Path) -> list[tuple[str, str]]:
    """Page and reason of each block that is not run."""
    return [(block.page, block.not_run) for block in blocks(page) if block.not_run]


def run_page(page: Path, folder: Path, seconds: float = SECONDS) -> None:
    """Run its blocks in this folder. A command that takes longer than these seconds is ended.

    Raises:
        PageFailed: what a block did, and what its page says.
    """
    with _Folder.opened(folder, seconds) as where:
        for block in blocks(page):
            if not block.not_run:
                where.run(block)


@dataclass(slots=True)
class _Folder:
    """Where a page's blocks run, and what the last of them printed."""

    path: Path
    log: IO[bytes]
    seconds: float
    python: _Python | None = None
    printed: str | None = None  # None: it was no block that prints

    @classmethod
    @contextmanager
    def opened(cls, path: Path, seconds: float) -> Iterator[_Folder]:
        with open(path.parent / f"{path.name}.log", "a+b") as log:
            where = cls(path, log, seconds)
            try:
                yield where
            finally:
                if where.python:
                    where.python.end()

    def run(self, block: Block) -> None:
        before, self.printed = self.printed, None
        if block.language == "console":
            self._console(block)
        elif block.language == "text":
            if block.follows and before is not None:
                _compare(f"{block.place}: the block before", block.text, before)
        elif block.file:
            file = self.path / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self.printed = self._python(block)
        elif block.language == "sh":
            code, self.printed = self._command(block.text, block.place)
            if code:
                raise PageFailed(f"{block.place}: exit code {code}\n{self.printed}")
        elif block.language != "diff":
            raise PageFailed(
                f"{block.place}: nothing runs a block of {block.language or 'no language'}. Name a"
                " file in its first line, or put <!-- not run: reason --> above it"
            )

    def _console(self, block: Block) -> None:
        """Each command and what it prints."""
        code, commands = 0, list(_commands(block))
        following = [command for _, command, _ in commands[1:]] + [""]
        for (place, command, expected), after in zip(commands, following, strict=True):
            if command == _CODE:
                printed = f"{code}\n"
            elif _STARTS_NO_RANKS.fullmatch(command):
                ((code, printed),) = launch(said_by, 1, (shlex.split(command), str(self.path)))
            else:
                code, printed = self._command(command, place)
            if code and _CODE not in (command, after):
                raise PageFailed(f"{place}: $ {command}\nexit code {code}\n{printed}")
            _compare(f"{place}: $ {command}", expected, printed)

    def _command(self, command: str, place: str) -> tuple[int, str]:
        """Its exit code, and what it and all that it started have printed."""
        start = self.log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            ["bash", "-e", "-c", command],
            cwd=self.path,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            raise PageFailed(
                f"{place}: not ended after {self.seconds:g} s\n{self._since(start)}"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return code, self._since(start)

    def _python(self, block: Block) -> str:
        start = self.log.seek(0, os.SEEK_END)
        if self.python is None:
            self.python = _Python.started(self.path, self.log)
        good = self.python.run(block)
        printed = self._since(start)
        if not good:
            raise PageFailed(f"{block.place}: it failed\n{printed}")
        return printed

    def _since(self, start: int) -> str:
        self.log.seek(start)
        return self.log.read().decode(errors="replace")


@dataclass(slots=True)
class _Python:
    """A process that runs a page's Python blocks one by one."""

    process: subprocess.Popen[bytes]
    jobs: IO[str]
    answers: IO[str]

    @classmethod
    def started(cls, folder: Path, log: IO[bytes]) -> _Python:
        theirs, jobs = os.pipe()
        answers, their_answers = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _SESSION, str(theirs), str(their_answers)],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs, their_answers),
            start_new_session=True,
        )
        os.close(theirs)
        os.close(their_answers)
        return cls(process, os.fdopen(jobs, "w"), os.fdopen(answers))

    def run(self, block: Block) -> bool:
        """Whether it ended without an exception. Its lines have their numbers in the page."""
        print(json.dumps(["\n" * block.line + block.text, block.page]), file=self.jobs, flush=True)
        return self.answers.readline() == "true\n"

    def end(self) -> None:
        self.jobs.close()
        try:
            self.process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.answers.close()


def said_by(command: list[str], folder: str) -> tuple[int, str]:
    """The exit code of a `lockstep` command in this process, and what it prints."""
    os.chdir(folder)
    os.environ["COLUMNS"] = "200"
    sys.argv = command
    said, code = io.StringIO(), None
    with redirect_stdout(said), redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return int(code or 0), said.getvalue()


def _environment() -> dict[str, str]:
    """A plain terminal's, in which `python` and `lockstep` are those of this Python."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "COLUMNS": "200", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}


def _commands(block: Block) -> Iterator[tuple[str, str, str]]:
    """Place, command, and what must be printed under it."""
    lines = block.text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    if not starts or starts[0]:
        raise PageFailed(f"{block.place}: a console block begins with '$ command'")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        behind = start + 1
        while lines[behind - 1].endswith("\\"):
            behind += 1
        command = "\n".join(lines[start:behind])[2:]
        printed = "".join(f"{line}\n" for line in lines[behind:end])
        yield f"{block.page}:{block.line + 1 + start}", command, printed


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def matches(expected: str, printed: str) -> bool:
    """Whether a page's text fits what was printed: `...` is any part of a line, or any lines."""
    pattern = ""
    for line in _plain(expected):
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"
    return bool(re.fullmatch(pattern, "".join(f"{line}\n" for line in _plain(printed))))


def _compare(what: str, expected: str, printed: str) -> None:
    if not matches(expected, printed):
        difference = "\n".join(difflib.ndiff(_plain(expected), _plain(printed)))
        raise PageFailed(
            f"{what}\nexpected:\n{expected}\nprinted:\n{printed}\ndifference:\n{difference}"
        )
