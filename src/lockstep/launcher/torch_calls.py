"""Note on its status page what a rank's script does with torch.distributed, for scripts that use
nothing of Lockstep's.

calls   each public function of torch.distributed is replaced by one that notes its name and where
        it was called, then calls the original. Results and exceptions pass unchanged. Lockstep
        notes its own calls itself (collectives/group.py)
native  DDP sends its buckets from C++, in the backward: no Python function is called. A thread
        reads torch's flight recorder twice a second. If a collective has not ended, and the main
        thread sleeps inside torch, it waits for that collective
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from lockstep.launcher.failures import named
from lockstep.launcher.when_imported import when_imported
from lockstep.runtime import status
from lockstep.runtime.failure_record import is_users
from lockstep.runtime.status import Page, short_dtype

_C10D = "torch.distributed.distributed_c10d"
_OF_ALL = re.compile(
    r"(all_(gather|reduce|to_all)|broadcast|gather|new_subgroups|reduce_scatter|scatter)(_\w+)?"
    r"|reduce|(monitored_)?barrier|(new|split)_group"
)
"""Functions that every rank of the group calls in the same order; without a group, every rank."""
_OF_SOME = re.compile(
    r"i?send|i?recv|(send|recv)_object_list|batch_isend_irecv|(destroy|init)_process_group"
)
_TENSORS = ("tensor", "input_tensor", "input", "output", "tensors", "input_tensor_list")
_PEERS = {"dst": "to", "src": "from", "group_dst": "to", "group_src": "from"}
_NATIVE_DTYPES = {"Float": "f32", "Double": "f64", "Half": "f16", "BFloat16": "bf16", "Long": "i64"}
_LOOK_SECONDS = 0.5


class _Call(NamedTuple):
    """The arguments of Page.call."""

    text: bytes
    among: bytes
    numbered: bool


def install() -> None:
    """Note this process's calls from now on; if torch is not imported yet, from when the script
    imports it.
    """
    page = status.page()
    if page is None:
        return
    when_imported(_C10D, lambda c10d: _Calls(page, c10d))


class _Calls:
    """Replaces the functions of `c10d`, and notes their calls."""

    def __init__(self, page: Page, c10d: Any) -> None:
        self._page = page
        self._c10d = c10d
        self._inside = False  # within another call, which has been noted
        self._works: WeakKeyDictionary[Any, _Call] = WeakKeyDictionary()
        package = sys.modules.get("torch.distributed")
        for name in c10d.__all__:
            if _OF_ALL.fullmatch(name) or _OF_SOME.fullmatch(name):
                original = getattr(c10d, name)
                replacement = self._noted(original, _Describer(name, original, c10d))
                setattr(c10d, name, replacement)
                if getattr(package, name, None) is original:
                    setattr(package, name, replacement)
        c10d.Work.wait = self._noted(c10d.Work.wait, self._of_work)

    def _noted(self, original: Any, describe: Callable[..., _Call | None]) -> Any:
        torch = sys.modules["torch"]  # it may be only partly imported
        page = self._page
        starts = getattr(original, "__name__", "") == "init_process_group"

        @functools.wraps(original)
        def noted(*args: Any, **keywords: Any) -> Any:
            # a compiler must see only the original
            if (
                torch.compiler.is_compiling()
                or self._inside
                or page.thread != threading.get_ident()
            ):
                return original(*args, **keywords)
            self._inside = True
            call = None
            try:
                frame = sys._getframe(1)
                if not frame.f_globals.get("__name__", "").startswith("lockstep."):
                    with suppress(Exception):
                        call = describe(frame, args, keywords)
                        if call is not None:
                            page.call(*call)
                result = original(*args, **keywords)
                if starts:
                    _watch_native(page)
            finally:
                self._inside = False
                if call is not None:
                    page.called()
            if call is not None and result is not None:
                self._keep(result, call)
            return result

        return noted

    def _keep(self, result: object, call: _Call) -> None:
        """Remember the call that started an asynchronous work, for when the script waits for it."""
        for work in result if isinstance(result, list) else (result,):
            if isinstance(work, self._c10d.Work):
                self._works[work] = call._replace(numbered=False)

    def _of_work(self, frame: FrameType, args: Sequence[Any], _: object) -> _Call:
        call = self._works.get(args[0])
        if call is None:
            text = _describe("Work.wait", "", None, (), _call_site(frame))
            call = _Call(text, status.EVERYBODY, False)
        return call


class _Describer:
    """Describes the calls of one function."""

    def __init__(self, name: str, function: Callable[..., Any], c10d: Any) -> None:
        self._name = name
        self._c10d = c10d
        self._of_all = _OF_ALL.fullmatch(name) is not None
        self._names = tuple(inspect.signature(function).parameters)
        self._tensor = next(filter(self._names.__contains__, _TENSORS), "")
        self._shaped = not name.startswith("all_to_all")  # ranks' parts may differ in all_to_all
        self._reduces = "op" in self._names
        self._peers = [name for name in _PEERS if name in self._names]

    def __call__(
        self, frame: FrameType, args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> _Call | None:
        """Describe a call; None in a rank that is no member of the group."""
        arguments = {**dict(zip(self._names, args, strict=False)), **keywords}
        group = arguments.get("group")
        ranks = None
        if self._name == "batch_isend_irecv":
            ranks = sorted({operation.peer for operation in arguments["p2p_op_list"]})
        elif arguments.get("use_local_synchronization"):
            ranks = arguments.get("ranks")
        if group is not None and group is not self._c10d.group.WORLD:
            if not isinstance(group, self._c10d.ProcessGroup):
                return None
            ranks = ranks or self._c10d.get_process_group_ranks(group)
        members = ""
        among = status.EVERYBODY
        if ranks is not None:
            members, among = _members(tuple(ranks))
        peer = ""
        for name in self._peers:
            rank = arguments.get(name)
            if rank is not None:
                if name.startswith("group_"):
                    rank = self._c10d.get_global_rank(group or self._c10d.group.WORLD, rank)
                peer = f"{_PEERS[name]} rank {rank}"
                if not self._of_all:  # it waits only for this rank
                    _, among = _members((rank,))
        tensor = arguments.get(self._tensor)
        if isinstance(tensor, list | tuple):
            tensor = tensor[0] if tensor else None
        shape = tuple(getattr(tensor, "shape", ())) if self._shaped else ("...",)
        op = _name_of(arguments.get("op") or "sum") if self._reduces else ""
        dtype = getattr(tensor, "dtype", None)
        text = _describe(self._name, op, dtype, shape, peer, members, _call_site(frame))
        return _Call(text, among, self._of_all and ranks is None)


# cached, because a program repeats its calls
@functools.lru_cache(maxsize=1024)
def _describe(name: str, op: str, dtype: object, shape: tuple[object, ...], *more: str) -> bytes:
    tensor = ""
    if dtype is not None:
        tensor = f"{short_dtype(dtype)}[{','.join(map(str, shape))}]"
    return status.shortened(" ".join(filter(None, (name, op, tensor, *more))))


@functools.lru_cache(maxsize=1024)
def _members(ranks: tuple[int, ...]) -> tuple[str, bytes]:
    """Return the ranks in words, and as a mask."""
    members = named(ranks) if len(ranks) <= 8 else f"{len(ranks)} ranks"
    return f"of {members}", status.mask(ranks)


@functools.lru_cache(maxsize=64)
def _name_of(op: object) -> str:
    return str(getattr(op, "name", op)).lower()


def _call_site(frame: FrameType | None) -> str:
    """Return the nearest line of the user's code: "at train.py:20"; "" if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return f"at {os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


_is_users = functools.lru_cache(maxsize=1024)(is_users)


# -- native code ---------------------------------------------------------------------------------


@functools.cache
def _watch_native(page: Page) -> None:
    """Start a thread that checks, until the program ends, whether the main thread waits in native
    code.
    """
    dump = getattr(sys.modules["torch._C._distributed_c10d"], "_dump_fr_trace_json", None)
    if dump is None:
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_watch_main_thread, args=(page, dump, over), name="lockstep-native", daemon=True
    )

    def end() -> None:  # native code must not run while Python ends
        over.set()
        thread.join()

    page.looked()
    thread.start()
    atexit.register(end)


def _watch_main_thread(page: Page, dump: Callable[..., bytes], over: threading.Event) -> None:
    # signals are for the main thread
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    home = os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    main = threading.main_thread().ident or 0
    task = Path(f"/proc/self/task/{os.getpid()}/stat")  # the main thread's id is the process's
    before: object = None
    while not over.wait(_LOOK_SECONDS):
        with suppress(Exception):
            now = json.loads(dump(False, False)).get("pg_status")
            if now != before:
                before = now
                page.moved()
                continue
            frame = sys._current_frames().get(main)
            if _pending(now or {}) and frame is not None and not page.waiting:
                text = b""
                state = task.read_text(encoding="utf-8").rpartition(")")[2].split()[0]
                if state in "SD" and frame.f_code.co_filename.startswith(home):
                    text = _describe_native(json.loads(dump(True, False)), frame)
                page.in_native(text)
            page.looked()


def _pending(groups: Mapping[str, Mapping[str, str]]) -> bool:
    """Return whether a collective may have begun and not ended. gloo's threads may count two that
    end together in the wrong order, so this may stay true.
    """
    return any(
        int(group["last_completed_collective"]) < int(group["last_enqueued_collective"])
        for group in groups.values()
    )


def _describe_native(recorded: Mapping[str, Any], frame: FrameType) -> bytes:
    """Return the first collective that has not ended, in words; b"" if all have."""
    function = frame.f_code.co_name
    if function == "_engine_run_backward":
        function = "a backward"
    position = f"in {function} {_call_site(frame)}"
    entries: Sequence[Mapping[str, Any]] = recorded.get("entries", ())
    if not entries:
        return status.shortened(f"a collective {position}")
    for entry in entries:
        if not entry["retired"] and not entry["is_p2p"]:
            kind = entry["profiling_name"].rpartition(":")[2]
            tensor = ""
            if entry["input_dtypes"] and entry["input_sizes"]:
                dtype = entry["input_dtypes"][0]
                shape = ",".join(map(str, entry["input_sizes"][0]))
                tensor = f" {_NATIVE_DTYPES.get(dtype, dtype.lower())}[{shape}]"
            return status.shortened(f"{kind}{tensor} {position}")
    return b""
