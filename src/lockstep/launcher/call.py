"""Send a function and its arguments to ranks, and their results back, in files without a name.

If the program is in a file, every rank imports it, as multiprocessing does, and functions are sent
by name. A notebook, an interactive session, `python -c` and `python -` cannot be imported: what
they define is sent by value (cloudpickle).
"""

from __future__ import annotations

import functools
import io
import linecache
import mmap
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import context, process, spawn
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

from lockstep.errors import UsageError
from lockstep.launcher.notebook import in_kernel
from lockstep.launcher.rank import modules_in

_COMPLETE = b"\1"

_handed_over: list[int] = []
"""In a rank: the descriptors that were sent with the call."""


def anonymous_file() -> int:
    """Return a descriptor of a file without a name, in memory if the system can. A parent and its
    children exchange data through it.
    """
    if sys.platform == "linux":
        return os.memfd_create("lockstep", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_complete(file: int, data: bytes) -> None:
    """Write `data` to an anonymous file that is still empty, and mark it as complete."""
    with os.fdopen(os.dup(file), "wb") as stream:
        stream.write(b"\0")
        stream.write(data)
    os.pwrite(file, _COMPLETE, 0)


def is_complete(file: int) -> bool:
    """Whether the file has been written to the end."""
    return os.pread(file, 1, 0) == _COMPLETE


def read_complete(file: int) -> bytes:
    """Return what was written, at whatever position other users of the file have read."""
    with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as content:
        return content[1:]


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionCall:
    """The work of a rank: read a call from the first file that it gets, and write its result to the
    second.
    """

    program: Mapping[str, Any]
    """What multiprocessing tells a new process about this one, above all about its main program."""
    by_value: bool
    """Whether functions are sent by value, because the main program cannot be imported."""
    sources: Mapping[str, Any]
    """The source text of such a program by cell name, as linecache has it, for tracebacks."""
    start_method: str | None
    """The caller's start method for processes, if it has set one. A rank starts its own processes,
    such as loader workers, in the same way.
    """

    @property
    def ours(self) -> bool:
        return True

    def beside(self) -> Sequence[str]:
        path = self.program.get("init_main_from_path")
        return () if path is None else modules_in(Path(path))

    @classmethod
    def here(cls) -> FunctionCall:
        """Create the call from this process's main program."""
        main = sys.modules["__main__"]
        # the folder in which this program was started
        origin: str = process.ORIGINAL_DIR or ""  # type: ignore[attr-defined]
        program = {
            "sys_path": sys.path.copy(),
            "sys_argv": sys.argv,
            "orig_dir": origin,
            "authkey": bytes(process.current_process().authkey),
        }
        by_value = not importable()
        spec = getattr(main, "__spec__", None)
        if spec is not None:
            program["init_main_from_name"] = spec.name
        elif not by_value:
            program["init_main_from_path"] = os.path.join(origin, str(main.__file__))
        sources = {}
        if by_value:
            for name, entry in linecache.cache.items():
                # a cell's source is not in a file
                if len(entry) > 1 and not os.path.exists(name) and not name.startswith("<frozen"):
                    sources[name] = entry
        return cls(
            program=program,
            by_value=by_value,
            sources=sources,
            start_method=multiprocessing.get_start_method(allow_none=True),
        )

    def write(
        self, file: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Write the call for `run`. Return the descriptors, such as those of queues, that ranks
        must inherit after the files.

        Raises UsageError if something cannot be sent.
        """
        if not self.by_value:
            _check_importable(fn)
        try:
            with _handing_over() as descriptors:
                write_complete(file, for_ranks((fn, tuple(args), dict(kwargs))))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError("call-not-sendable", error=str(error)) from error
        return descriptors

    def run(self, *descriptors: int) -> None:
        question, answer, *handed_over = descriptors
        _handed_over[:] = handed_over
        linecache.cache.update(self.sources)
        rank = int(os.environ["RANK"])
        multiprocessing.set_start_method(self.start_method, force=True)
        # as in multiprocessing's own children
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(dict(self.program))
            fn, args, kwargs = pickle.loads(read_complete(question))
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]
        result = fn(*args, **kwargs)
        _close_world()
        write_complete(answer, self._portable(result, rank))

    def _portable(self, answer: object, rank: int) -> bytes:
        try:
            return _dumped(_by_value() if self.by_value else pickle.Pickler, answer)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                "result-not-sendable", rank=rank, kind=type(answer).__name__, error=str(error)
            ) from None


def _check_importable(fn: Callable[..., Any]) -> None:
    """Raise UsageError for a function that a new process cannot import. Otherwise the process would
    fail with a pickling traceback.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", "")
    if "<" in name:  # <lambda>, or something in a function's <locals>
        raise UsageError("function-not-importable", name=name)


def importable() -> bool:
    """Whether other processes can import this one's main program: it is not a notebook, an
    interactive session, `python -c` or `python -`.
    """
    if in_kernel():  # VS Code sets __file__ in the kernel of its interactive window
        return False
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    file = getattr(main, "__file__", None)
    origin: str = process.ORIGINAL_DIR or ""  # type: ignore[attr-defined]
    return bool(file) and os.path.exists(os.path.join(origin, str(file)))


def for_ranks(value: object) -> bytes:
    """Pickle `value` for other processes: importable objects by name, tensors as copies."""
    return _dumped(_Copying if importable() else _by_value(), value)


class _Copying(ForkingPickler):
    """A pickler that can send queues and locks. It copies tensors, so they share no memory."""

    def reducer_override(self, value: Any) -> Any:
        return _copied(value)


def _by_value() -> type[pickle.Pickler]:
    import cloudpickle

    reducers = cloudpickle.Pickler.dispatch_table

    def code(value: CodeType) -> Any:
        make, arguments = reducers[CodeType](value)
        return _code_of_file, (value.co_filename, make, arguments)

    class ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        dispatch_table: ClassVar = ChainMap(
            {CodeType: code}, reducers, ForkingPickler(io.BytesIO()).dispatch_table
        )  # ForkingPickler can pickle queues and locks

        def reducer_override(self, value: Any) -> Any:
            reduced = _copied(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return ByValue


def _code_of_file(name: str, make: Callable[..., CodeType], arguments: Sequence[Any]) -> CodeType:
    """Return the code with its file's name, which a traceback needs to find its lines.

    cloudpickle leaves the name out from 3.1.3 on.
    """
    return make(*arguments).replace(co_filename=name)


def _copied(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None:
        copied = torch.Tensor | torch.UntypedStorage | torch.TypedStorage
        if isinstance(value, copied):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return NotImplemented


def _dumped(pickler: type[pickle.Pickler], value: object) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


@contextmanager
def _handing_over() -> Iterator[list[int]]:
    """In the block, allow pickling what multiprocessing pickles only for new processes. Yields the
    descriptors that must be sent with it.
    """
    descriptors: list[int] = []

    class Starting:
        """A stand-in for the process being started, with what multiprocessing's picklers ask it
        for.
        """

        DupFd = Inherited

        @staticmethod
        def duplicate_for_child(descriptor: int) -> int:
            descriptors.append(descriptor)
            return len(descriptors) - 1

    context.set_spawning_popen(Starting)  # type: ignore[arg-type]  # a stand-in
    try:
        yield descriptors
    finally:
        context.set_spawning_popen(None)


@dataclass(frozen=True, slots=True)
class Inherited:
    """A descriptor that was sent with the call, unpickled in a rank."""

    number: int

    def detach(self) -> int:
        return _handed_over[self.number]


def _close_world() -> None:
    """Close the world that the function left open. Its module is looked up, not imported: a
    function that has not imported it has no world.
    """
    worlds = sys.modules.get("lockstep.world.world")
    if worlds is not None:
        worlds.World.close_open()
