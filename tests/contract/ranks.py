"""Runs test bodies that torch ships in its wheel, in two ranks that are started once.

torch starts new processes for each of its tests, which costs seconds a test. Here the parent
imports torch's tests, forks two ranks, and these run one body after the other. A body that fails,
hangs or leaves the process group unusable ends its ranks; the next one gets new ones.

    python -m tests.contract.SUITE OUT [--only NAME ...] [--but NAME ...]       # writes {name: "passed" | what went wrong}
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

RANKS = 2
# seconds of one body: what hangs is ended, and a machine that is ten times slower is not
LIMIT = 120.0
PASSED = "passed"
ROOT = Path(__file__).parents[2]


def torchs_helpers() -> Any:
    """Set what torch's tests read while they are imported, and return their common module. They
    are those for CPUs.
    """
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    # torch's test classes derive from expecttest's, which its wheel does not require. No body that
    # runs here uses what it adds.
    module = types.ModuleType("expecttest")
    module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    module.ACCEPT = False  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", module)

    from torch.testing._internal import common_distributed

    common_distributed.skip_if_no_gpu = lambda body: body
    common_distributed.init_multigpu_helper = lambda size, backend: {
        rank: [rank] for rank in range(size)
    }
    return common_distributed


def bodies(suite: type[unittest.TestCase], *, of_wrapper: bool) -> list[str]:
    """Return the names of the suite's tests that use torch's wrapper, themselves or through a
    helper; or of those that do not.
    """
    base = suite.__mro__[1]
    sources = {
        name: inspect.getsource(body)
        for name, body in vars(base).items()
        if inspect.isfunction(body)
    }
    using = {
        name
        for name, text in sources.items()
        if "DistributedDataParallel" in text or "ddp" in name.lower()
    }
    while more := {
        name
        for name, text in sources.items()
        if name not in using and any(f"self.{other}(" in text for other in using)
    }:
        using |= more
    others = {name for name in sources if name not in using and "nccl" not in name}
    names = using if of_wrapper else others
    return sorted(name for name in names if name.startswith("test_"))


class OnCpu(TorchFunctionMode):
    """Places on the CPU what a body places on a GPU: most of torch's DDP tests ask for one GPU a
    rank and test nothing about it.
    """

    def __torch_function__(
        self,
        func: Any,
        kinds: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(on_cpu, args[1:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return func(*args, **kwargs)


def on_cpu(place: Any) -> Any:
    """The CPU in place of a GPU, a GPU's name or its number; everything else as it is."""
    if isinstance(place, torch.device) or (isinstance(place, str) and place.startswith("cuda")):
        return torch.device("cpu")
    return torch.device("cpu") if isinstance(place, int) and not isinstance(place, bool) else place


def gpus_are_cpus() -> None:
    """What a body calls of torch.cuda does nothing, and modules stay where they are."""

    @contextmanager
    def nothing(*args: object, **kwargs: object) -> Iterator[None]:
        yield

    to = torch.nn.Module.to
    torch.nn.Module.cuda = lambda module, device=None: module  # type: ignore[method-assign,assignment,return-value]
    torch.nn.Module.to = lambda module, *args, **kwargs: to(  # type: ignore[method-assign,assignment]
        module,
        *map(on_cpu, args),
        **{key: on_cpu(value) if key == "device" else value for key, value in kwargs.items()},
    )
    for name in ("set_device", "synchronize", "manual_seed", "Stream"):
        # each its own: torch.compile has a table of them
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device, torch.cuda.stream = nothing, contextmanager(nothing.__wrapped__)  # type: ignore[assignment,misc]


def run(names: Sequence[str], suite: Callable[[str], Any], backend: str) -> dict[str, str]:
    """Run every body in both ranks, and return what became of each."""
    outcomes: dict[str, str] = {}
    gc.collect()
    # each body ends with a collection, which would look at all of torch and its tests: nine tenths
    # of a body's CPU time
    gc.freeze()
    left = list(names)
    while left:
        left = left[_some(left, suite, backend, outcomes) :]
    return outcomes


def _some(
    names: Sequence[str], suite: Callable[[str], Any], backend: str, outcomes: dict[str, str]
) -> int:
    """Run bodies in two new ranks until the ranks cannot be used any more; how many were run."""
    with tempfile.TemporaryDirectory(prefix="lockstep-contract-") as folder:
        context = mp.get_context("fork")
        pipes = [context.Pipe() for _ in range(RANKS)]
        ranks = [
            context.Process(target=_rank, args=(rank, Path(folder), pipes, suite, backend))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        try:
            for number, name in enumerate(names):
                for pipe, _ in pipes:
                    pipe.send(name)
                results = [
                    _outcome(pipe, process) for (pipe, _), process in zip(pipes, ranks, strict=True)
                ]
                outcomes[name] = next((result for result in results if result != PASSED), PASSED)
                if outcomes[name] != PASSED:
                    for output in Path(folder).glob("output-*"):
                        outcomes[name] += f"\n{output.name}: {output.read_text()[-1500:]}"
                    return number + 1
            return len(names)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _outcome(pipe: Connection, process: Any) -> str:
    ready = wait([pipe, process.sentinel], LIMIT)
    if pipe in ready:
        outcome: str = pipe.recv()
        return outcome
    return (
        f"process ended with {process.exitcode}" if ready else f"still running after {LIMIT:.0f} s"
    )


def _rank(
    rank: int,
    folder: Path,
    pipes: Sequence[tuple[Connection, Connection]],
    suite: Callable[[str], Any],
    backend: str,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number, (parents, ours) in enumerate(pipes):  # so that both ranks see when the parent ends
        parents.close()
        if number != rank:
            ours.close()
    pipe = pipes[rank][1]
    gpus_are_cpus()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), TEMP_DIR=str(folder))
    for name in ("test_dir", "barrier", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    with (folder / f"output-{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    with suppress(EOFError):
        while True:
            pipe.send(_body(suite, pipe.recv(), rank))


def _body(suite: Callable[[str], Any], name: str, rank: int) -> str:
    """Run one body; PASSED, or the end of its traceback."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            test = suite(name)
            test.rank = rank
            with OnCpu():
                getattr(test, name)()
            test.doCleanups()
        gc.collect()
        dist.barrier()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    except SystemExit as ended:
        return f"skipped: exit code {ended.code}"
    except BaseException as error:
        return "".join(traceback.format_exception(error, limit=-4))[-1500:]
    return PASSED


def main(names: Sequence[str], suite: Callable[[str], Any], backend: str = "gloo") -> None:
    """Run the bodies that the command line asks for, and write what became of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=names)
    parser.add_argument("--but", nargs="+", default=[], help="regular expressions")
    asked = parser.parse_args()
    left_out = re.compile("|".join(asked.but) or "$^")
    chosen = [name for name in names if name in asked.only and not left_out.fullmatch(name)]
    asked.out.write_text(json.dumps(run(chosen, suite, backend), indent=1))


# -- for the tests that run these suites -----------------------------------------------------------


def outcomes_of(suite: str, out: Path, *arguments: str) -> dict[str, str]:
    """Run a suite in processes of its own: what became of each body."""
    command = [sys.executable, "-m", f"tests.contract.{suite}", str(out), *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    outcomes: dict[str, str] = json.loads(out.read_text())
    return outcomes


def check(outcomes: Mapping[str, str], guide: str) -> None:
    """Bodies fail if and only if the guide's table says that they stay different."""
    text = (ROOT / "docs" / "guide" / guide).read_text()
    different = set(re.findall(r"^\| `(test_\w+)` \|", text, re.MULTILINE))
    failed = {name: outcome for name, outcome in outcomes.items() if outcome != PASSED}
    assert set(failed) == different, "\n\n".join(
        f"{name}\n{outcome}" for name, outcome in failed.items() if name not in different
    )
