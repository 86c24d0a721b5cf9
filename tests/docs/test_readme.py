"""The README and the first hour do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.launcher.start import WARM
from tests.docs.pages import ROOT, blocks, run_page

pytestmark = pytest.mark.rest

_OF_THE_MACHINE = r"""(?x)
    (?<=sha256[ ])\w+(\.\.\.)? | (?<=accuracy[ ])[\d.]+            # processors round differently
    | (?<=pid[ ])\d+ | (?<=at[ ]step[ ])\d+,                       # a kill comes at any step
    | (?<=\d[ ]steps,[ ])3[ ]workers(?=,[ ]\.\.\.[ ]exact)          # or 4 again, on a busy host
"""

_AS_IN_A_TERMINAL = re.compile(r"^\$ (bash kill\.sh|timeout )", re.MULTILINE)
"""Commands that start their ranks themselves: these are then grandchildren of the command, as
kill.sh takes them to be, and take as long to start as the seconds of `timeout` assume.
"""

_BEFORE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from safetensors.torch import save_file

inputs = torch.randn(600, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())
torch.manual_seed(0)

def Net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

"""
_AFTER = """
import os
if os.environ.get("RANK", "0") == "0":
    save_file(dict(model.named_parameters()), "weights")
"""


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first-hour.md"])
def test_its_blocks_do_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray keeps its token
    text = re.sub(_OF_THE_MACHINE, "...", (ROOT / page).read_text(encoding="utf-8"))
    copy, folder = tmp_path / "copy.md", tmp_path / "folder"
    copy.write_text(_AS_IN_A_TERMINAL.sub(rf"$ env -u {WARM} \1", text), encoding="utf-8")
    folder.mkdir()

    run_page(copy, folder)

    assert len(_AS_IN_A_TERMINAL.findall(text)) == 1
    printed = (tmp_path / "folder.log").read_text(encoding="utf-8")
    exact = re.findall(r"exact \|.* sha256 (\w{64})", printed)
    assert len(exact) == 3
    assert len(set(exact)) == 1


def weights(lines: Sequence[str], folder: Path, *command: str) -> dict[str, torch.Tensor]:
    """What a side of the README's diff trains with this command."""
    folder.mkdir()
    (folder / "script.py").write_text(_BEFORE + "\n".join(lines) + _AFTER)
    subprocess.run(
        [sys.executable, *command, "script.py"], cwd=folder, check=True, capture_output=True
    )
    return load_file(folder / "weights")


@pytest.mark.parametrize("shuffle", ["shuffle=True", "shuffle=False"])
def test_the_new_side_of_the_diff_trains_the_same_on_any_number_of_workers(
    tmp_path: Path, shuffle: str
) -> None:
    """And what the old side trains, where both have the same order."""
    (diff,) = [block for block in blocks(ROOT / "README.md") if block.language == "diff"]
    lines = diff.text.replace("shuffle=True", shuffle).splitlines()
    new = [line[1:] for line in lines if line[0] in " +"]
    old = [line[1:] for line in lines if line[0] in " -"]

    expected = weights(new, tmp_path / "new")
    run = ("-m", "lockstep", "run", "--workers")
    trained = {"on 3 workers": weights(new, tmp_path / "three", *run, "3")}
    if shuffle == "shuffle=False":
        trained["old"] = weights(old, tmp_path / "old")

    for parameters in trained.values():
        assert parameters.keys() == expected.keys()
        for name, parameter in expected.items():
            torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-6)
