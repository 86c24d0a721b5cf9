"""How processes start. A rank that was forked from a warm server, one that is a fresh interpreter
and plain Python describe themselves: they find the same.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.launcher.start import WARM, ServerGone, acting, fork_server, set_by
from tests.launcher.commands import python

_DESCRIBE = """
import os

descriptors = {number: None for number in os.listdir("/proc/self/fd")}
for number in descriptors:
    try:
        descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        pass

import asyncio, concurrent.futures, faulthandler, gc, json, logging, multiprocessing, pickle, random, resource, signal, subprocess, sys, warnings
from pathlib import Path


class Mine:
    pass


def own(value):
    return type(value).__name__, os.environ.get("RANK")


def stream(each):
    return [each.encoding, each.errors, each.newlines, each.name, each.mode, each.isatty(), each.fileno()]


def main():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    umask = os.umask(0)
    os.umask(umask)
    found = {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": umask,
        "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "nice": os.nice(0),
        "blocked": status["SigBlk"],
        "ignored": status["SigIgn"],
        "SIGINT": str(signal.getsignal(signal.SIGINT)),
        "SIGTERM": str(signal.getsignal(signal.SIGTERM)),
        "SIGCHLD": str(signal.getsignal(signal.SIGCHLD)),
        "wakeup": signal.set_wakeup_fd(-1),
        "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
        "stdin": sys.stdin.read(),
        "flags": {name: getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_" and name not in ("safe_path", "count", "index")},
        "options": [sys._xoptions, sys.warnoptions, __debug__],
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path,
        "main": {name: str(value) for name, value in globals().items() if name in
            ("__file__", "__package__", "__spec__", "__doc__")},
        "loader": type(__loader__).__name__,
        "pickled": type(pickle.loads(pickle.dumps(Mine()))) is Mine,
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
        "recursion": sys.getrecursionlimit(),
        "hooks": [sys.gettrace(), sys.getprofile()],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
        "asyncio": asyncio.run(asyncio.sleep(0, "slept")),
        "subprocess": subprocess.run(["sh", "-c", "ulimit -n; umask; echo $MARK"], capture_output=True, text=True).stdout,
    }
    import torch

    found["torch"] = [torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(), torch.cuda.is_initialized()]
    for method in ("fork", "spawn", "forkserver"):
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            found[method] = pool.submit(own, Mine()).result()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found["thread"] = pool.submit(own, Mine()).result()
    import numpy

    private = {
        "descriptors": descriptors,
        "random": [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()],
        "name": Path("/proc/self/comm").read_text().strip(),
        "child": subprocess.run(["cat", f"/proc/self/comm"], capture_output=True, text=True).stdout.strip(),
        "group": os.getpgid(0) == os.getsid(0) == os.getpid(),
        "threads": int(status["Threads"]),
        "stack": faulthandler.is_enabled(),
    }
    target = Path(os.environ["TARGET"] + os.environ.get("RANK", ""))
    target.write_text(json.dumps({"found": found, "private": private}))


if __name__ == "__main__":
    main()
"""
# begin the names of its variables
_OF_A_RANK = tuple(
    ["GROUP_", "LOCAL_", "LOCKSTEP_", "MASTER_", "RANK", "ROLE_", "TORCHELASTIC_", "WORLD_"]
)
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"  # as it is imported


@dataclass
class Described:
    found: dict[str, Any]
    """What is to be the same."""
    private: dict[str, Any]


def _read(file: Path) -> Described:
    described = Described(**json.loads(file.read_text()))
    variables = described.found["environment"]
    for name in [*variables]:
        if name in ("TARGET", _SET_BY_TORCH) or name.startswith(_OF_A_RANK):
            del variables[name]
    # flags that a variable has set are among the rest
    described.found["orig_argv"] = described.found["orig_argv"][-3:]
    described.found["fork"] = described.found["fork"][0]
    for method in ("spawn", "forkserver", "thread"):
        described.found[method] = described.found[method][0]
    return described


def _beginning() -> None:
    """Of the shell, so to say, that starts the command."""
    os.umask(0o027)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 700), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])


def _environment() -> dict[str, str]:
    """Without the warm server: what this session's processes begin with differs."""
    return {name: value for name, value in os.environ.items() if not name.startswith(WARM)}


def _started(folder: Path, kind: str, flags: Sequence[str], environment: dict[str, str]) -> None:
    run = ["-m", "lockstep", "run", "--workers", "2"]
    command = {"plain": [], "warm": run, "cold": [*run, "--cold"]}[kind]
    subprocess.run(
        [sys.executable, *flags, *command, "describe.py", "-x", "a b"],
        cwd=folder,
        env={**_environment(), "TARGET": str(folder / kind), "MARK": "set", **environment},
        input="typed\n",
        text=True,
        check=True,
        preexec_fn=_beginning,
    )


def _described(
    folder: Path, kinds: Sequence[str], *flags: str, **environment: str
) -> dict[str, list[Described]]:
    """By "plain", "cold" and "warm"."""
    (folder / "describe.py").write_text(_DESCRIBE)
    for kind in kinds:
        _started(folder, kind, flags, environment)
    return {
        kind: [_read(folder / f"{kind}{rank}") for rank in (("",) if kind == "plain" else (0, 1))]
        for kind in kinds
    }


@pytest.mark.parametrize("kind", ["warm", pytest.param("cold", marks=pytest.mark.rest)])
def test_ranks_find_what_plain_python_finds(tmp_path: Path, kind: str) -> None:
    """Takes seconds: plain Python and cold ranks import torch, and so does the server that forks
    warm ones.
    """
    (tmp_path / "elsewhere").mkdir()
    flags = "-X int_max_str_digits=5000 -u -W error::BytesWarning -W ignore::ResourceWarning"
    if kind == "cold":  # with it Python compiles all of torch anew
        flags += " -O"
    environment = {
        "PYTHONHASHSEED": "7",
        "PYTHONWARNINGS": "error::FutureWarning",
        "PYTHONPATH": str(tmp_path / "elsewhere"),
        "PYTHONIOENCODING": "latin-1",
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C",
    }
    described = _described(tmp_path, ["plain", kind], *flags.split(), **environment)
    (plain,) = described["plain"]
    assert plain.found["torch"][0] == 1
    assert plain.found.pop("stdin") == "typed\n"
    for number, rank in enumerate(described[kind]):
        # they share it, and one of them has read it
        assert rank.found.pop("stdin") in ("typed\n", "")
        assert rank.found == plain.found
        opened = rank.private["descriptors"]
        extra = len(opened) - len(plain.private["descriptors"])
        assert extra == 4, "files of the run, and no other"
        if kind == "warm":
            assert (rank.private["name"], rank.private["child"]) == (f"rank {number}", "cat")
            assert (rank.private["group"], rank.private["threads"]) == (True, 1)
            assert rank.private["stack"]
            kinds = ("socket:", "/memfd:", "anon_inode:")
            assert not [file for file in opened.values() if file and file.startswith(kinds)]
    drawn = [rank.private["random"] for ranks in described.values() for rank in ranks]
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(drawn)


def test_variables_that_act_as_a_library_starts_are_told_from_others() -> None:
    libraries = {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "+dynamo", "PYTHONHASHSEED": "7"}
    others = {"TORCHELASTIC_RUN_ID": "x", "PATH": "/bin", "RANK": "1"}
    assert dict(acting(libraries | others)) == libraries


def test_a_script_that_sets_one_itself(tmp_path: Path) -> None:
    lines = {
        "os.environ['OMP_NUM_THREADS'] = '1'": "OMP_NUM_THREADS",
        'os.environ.setdefault("MKL_NUM_THREADS", "1")': "MKL_NUM_THREADS",
        'os.putenv("PYTORCH_CUDA_ALLOC_CONF", "x")': "PYTORCH_CUDA_ALLOC_CONF",
        "os.environ.update(\n    A='1', OMP_NUM_THREADS='1')": "OMP_NUM_THREADS",
        "os.environ['TOKENIZERS_PARALLELISM'] = 'false'": "",
        "print(os.environ.get('OMP_NUM_THREADS'))": "",
        "# OMP_NUM_THREADS": "",
    }
    script, archive = tmp_path / "script.py", tmp_path / "archive.zip"
    for line, name in lines.items():
        script.write_text(f"import os\n\n{line}\nimport torch\n")
        assert set_by(script) == name, line
    archive.write_bytes(b"PK\x03\x04\xff\xfe")
    assert (set_by(archive), set_by(tmp_path)) == ("", ""), "what is no text sets none"


@pytest.mark.rest
def test_all_flags_are_handed_on() -> None:
    program = "from lockstep.launcher.fork_server import flags; print(*flags())"
    given = ["-O", "-X", "dev", "-X", "int_max_str_digits=5000", "-W", "error"]
    done = python(*given, "-c", program)
    bytecode = ["-B"] if os.environ.get("PYTHONDONTWRITEBYTECODE") else []
    options = ["-X", "dev", "-X", "int_max_str_digits=5000"]
    assert done.stdout.split() == ["-O", *bytecode, "-Werror", *options]


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_request_ends_the_server_and_the_next_call_has_another_one() -> None:
    """Else the next request would get the answer to this one."""
    first = fork_server(cold=True)
    os.kill(first.pid, signal.SIGSTOP)  # so that the answer does not come before the interrupt
    with pytest.raises(KeyboardInterrupt):
        first.ready(_interrupt)
    assert not first.alive
    with pytest.raises(ServerGone):
        first.codes([1])
    second = fork_server(cold=True)
    assert second is not first
    assert second.alive
    second.close()


def test_of_three_servers_the_one_that_was_used_longest_ago_is_ended() -> None:
    first, second = (fork_server(environment=_seeded(seed), cold=True) for seed in (1, 2))
    assert fork_server(environment=_seeded(1), cold=True) is first
    third = fork_server(environment=_seeded(3), cold=True)
    assert [server.alive for server in (first, second, third)] == [True, False, True]


def _seeded(seed: int) -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": str(seed)}


@pytest.mark.rest
def test_a_process_with_the_number_of_an_earlier_one_has_not_ended() -> None:
    """Numbers come again within minutes where many processes are started, as a test suite does."""
    last = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last, os.W_OK):
        pytest.skip("only root can choose the next process's number")
    server = fork_server(cold=False)
    while True:  # another program may take the number first
        earlier = server.fork(print)
        server.release(earlier)
        last.write_text(str(earlier - 1))
        later = server.fork(signal.pause)
        code = server.codes([later])[later]
        os.kill(later, signal.SIGKILL)
        server.release(later)
        if later == earlier:
            break
    assert code is None
