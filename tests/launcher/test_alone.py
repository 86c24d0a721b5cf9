"""Ranks that each run the whole program by themselves are told so; those that have had a process group, however it was opened, are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep import status
from lockstep.launcher import alone
from lockstep.launcher.supervise import Target, supervise
from lockstep.step_clock import INDEX


def page(folder: Path, rank: int, *, over: bool, opened: bool) -> None:
    written = status.Page(status.file_of(folder, rank))
    if opened:
        written.opened()
    if over:
        written.enter(INDEX["end"], time.monotonic_ns())


def test_one_rank_that_had_a_group_or_left_without_a_word_is_enough_for_silence(tmp_path: Path) -> None:
    page(tmp_path, 0, over=True, opened=False)
    page(tmp_path, 1, over=True, opened=False)
    page(tmp_path, 2, over=True, opened=True)
    page(tmp_path, 3, over=False, opened=False)
    assert "2 ranks never joined" in alone.warning(tmp_path, [0, 1], 2)
    assert "4 ranks never joined" in alone.warning(tmp_path, [0, 1], 4)
    assert alone.warning(tmp_path, [0], 1) == ""
    assert alone.warning(tmp_path, [0, 1, 2], 3) == ""
    assert alone.warning(tmp_path, [0, 1, 3], 3) == ""
    assert alone.warning(tmp_path, [0, 1, 9], 3) == ""


ALONE = "import torch; torch.distributed.is_available()"
OURS = "import lockstep\nwith lockstep.init(): pass"
TORCHS = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()"
OWN_STORE = """
import os
import torch.distributed as dist
store = dist.FileStore("store", 2)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("text", "workers", "warned"), [(ALONE, 2, True), (ALONE, 1, False), (OURS, 2, False), (TORCHS, 2, False), (OWN_STORE, 2, False)]
)
def test_a_program_that_never_becomes_distributed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], text: str, workers: int, warned: bool
) -> None:
    (tmp_path / "script.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert supervise(Target(script="script.py"), workers).exit_code == 0
    err = capfd.readouterr().err
    assert ("never joined" in err) == warned
    assert len(err.splitlines()) == int(warned)
