"""`lockstep run` from the outside: arguments, codes, logs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.command import Command, process

_COLLECTIVES = """
import os, torch, lockstep
print(*(os.environ.get(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "TORCH_CPP_LOG_LEVEL", "RANK")))
with lockstep.init() as world:
    world.group.all_reduce(torch.ones(3, 4)).wait()
    lockstep.collectives.all_reduce(torch.ones(7, dtype=torch.float64), algorithm="ring")
    lockstep.collectives.broadcast(torch.ones(2, dtype=torch.int64), root=1, algorithm="shared_memory")
    world.barrier()
    work = world.group.backend_all_reduce(torch.ones(5))
    work._work.wait()
torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)  # torch logs it
"""


def test_arguments_pass_through_untouched(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['RANK'], sys.argv)")
    theirs = ["--workers", "3", "-m", "--help", "a b", "", "$HOME", "$$", "${local_rank}"]
    theirs += ["--", "-x", "*"]
    ended = process(["run", "--workers", "2", "script.py", *theirs], tmp_path)
    assert ended.err.startswith("warning: the 2 ranks never joined")
    assert sorted(ended.out.splitlines()) == [
        f"[{rank}] {rank} {['script.py', *theirs]}" for rank in (0, 1)
    ]


def test_a_module_and_an_exit_code_of_its_own(tmp_path: Path, lockstep: Command) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:], __name__); sys.exit(5)"
    )
    ended = lockstep("run --workers 1 -m package.train --workers 4")
    assert (ended.code, ended.out) == (5, "1 ['--workers', '4'] __main__\n")


def test_debug_writes_to_the_logs_and_what_the_user_set_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each collective, however it is carried; torch's own lines; NCCL's variables
    set, or left as they were.
    """
    (tmp_path / "script.py").write_text(_COLLECTIVES)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    ended = process("run -n 2 --log logs --debug script.py", tmp_path)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["[0] WARN None INFO 0", "[1] WARN None INFO 1"]
    assert not ended.err
    for rank in (0, 1):
        lines = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert any("[c10d]" in line for line in lines)
        assert f"WARN None INFO {rank}" in lines
        told = [line for line in lines if line.startswith("collective #")]
        assert [re.sub(r"\d+\.\d\d ms", "T ms", line) for line in told] == [
            f"collective {text}, ranks 0,1: {time}"
            for text, time in (
                ("#1 all_reduce sum f32[3,4] at script.py:5, 12 elements", "T ms"),
                ("#2 all_reduce sum by ring f64[7] at script.py:6, 7 elements", "T ms"),
                ("#3 broadcast from 1 i64[2] at script.py:7, 2 elements", "T ms"),
                ("#5 all_reduce sum f32[5] at script.py:9, 5 elements", "not waited for"),
            )
        ]


# A rank kills itself where the script calls `kill(step)`, as often as its first argument says.
_KILLS = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import lockstep

def kill(step):
    killed = len(list(Path().glob("killed-*")))
    if step == 12 and killed < int(sys.argv[1]) and os.environ["RANK"] == "1":
        Path(f"killed-{killed}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
_PREPARED = (
    _KILLS
    + """
with lockstep.init() as world:
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = lockstep.prepare(
        model, optimizer, loader, micro_batch=4, exact=True, run="mine", checkpoint_every=5
    )
    for epoch in loader.epochs(4):
        for x, y in loader:
            kill(loader.step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    if world.rank == 0:
        print(lockstep.checks.identity.sha256(model.state_dict()), world.size)
"""
)
_OWN_CHECKPOINTS = (
    _KILLS
    + """
with lockstep.init() as world:
    world.heed_signals()
    stepper = lockstep.Stepper(model, optimizer, exact=True)
    loader = lockstep.Loader(data, global_batch=8, micro_batch=4)
    checkpoints = lockstep.Checkpoints("mine", stepper, loader, every=2)
    checkpoints.resume()
    for epoch in loader.epochs(5):
        for window in epoch:
            kill(stepper.steps)
            for _ in range(2000 if stepper.steps == 18 and world.size == 2 else 0):
                if not world.asked_to_stop:
                    time.sleep(0.01)
            for x, y in stepper.micro_batches(window):
                stepper.backward(F.cross_entropy(model(x), y), weight=len(y), reduction="mean")
            result = stepper.step()
            checkpoints.step()
            if result.stop:
                checkpoints.close()
                sys.exit(75)
    checkpoints.close()
    if world.rank == 0:
        print(lockstep.checks.identity.sha256(model.state_dict()), world.size)
"""
)
_PLAIN = (
    _KILLS
    + """
with lockstep.init() as world:
    world.barrier()
    print("begins", flush=True)
    kill(12)
    world.barrier()
"""
)
_HINT = "no checkpoint of this script is known yet, so it begins again"


def _weights(folder: Path, script: str, options: str, kills: int) -> tuple[str, list[str]]:
    """What the script prints, and what is said of restarts."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    ended = process(f"run {options} script.py {kills}", folder)
    assert ended.code == 0, ended.err
    assert len(list(folder.glob("killed-*"))) == kills
    lines = ended.err.splitlines()
    said = [line for line in lines if line.startswith("restart") or _HINT in line]
    return ended.out.split()[-2], said


def test_a_script_with_prepare_is_restarted_and_ends_with_the_undisturbed_bits(
    tmp_path: Path,
) -> None:
    undisturbed, _ = _weights(tmp_path / "one", _PREPARED, "-n 1", 0)
    weights, said = _weights(tmp_path / "two", _PREPARED, "-n 2 --max-restarts 1", 1)
    assert weights == undisturbed
    assert said == ["restart 1 of 1: 2 workers, from the newest checkpoint"]


def test_a_script_goes_on_with_fewer_workers_and_grows_back(tmp_path: Path) -> None:
    undisturbed, _ = _weights(tmp_path / "one", _OWN_CHECKPOINTS, "-n 1", 0)
    weights, said = _weights(tmp_path / "two", _OWN_CHECKPOINTS, "-n 1:3", 1)
    assert weights == undisturbed
    assert said == [
        "restart 1 of 3: 2 workers, from the newest checkpoint",
        "restart: 3 workers again, from the newest checkpoint",
    ]


def test_a_script_without_checkpoints_begins_again_and_is_told_so_once(
    tmp_path: Path, lockstep: Command
) -> None:
    (tmp_path / "script.py").write_text(_PLAIN)
    ended = lockstep("run -n 1:2 --max-restarts 2 script.py 1")
    assert (ended.code, ended.err.count("restart")) == (0, 1), ended.err
    assert ended.out.splitlines()[-1] == "begins"
    ended = lockstep("run -n 2 --max-restarts 2 script.py 9")
    assert ended.code == 137
    lines = ended.err.splitlines()
    assert [line for line in lines if line.startswith("restart")] == [
        "restart 1 of 2: 2 workers, from the beginning",
        "restart 2 of 2: 2 workers, from the beginning",
    ]
    assert ended.err.count(_HINT) == 1


def test_a_script_that_was_asked_to_stop_is_not_restarted(
    tmp_path: Path, lockstep: Command
) -> None:
    (tmp_path / "script.py").write_text(_PREPARED.replace("SIGKILL", "SIGTERM"))
    ended = lockstep("run -n 1:2 script.py 1")
    assert (ended.code, ended.err.count("restart")) == (75, 0), ended.err


def test_an_exception_of_a_script_restarts_nothing(tmp_path: Path, lockstep: Command) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('boom')")
    ended = lockstep("run -n 1:2 script.py")
    assert (ended.code, ended.err.count("restart")) == (1, 0)
