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
