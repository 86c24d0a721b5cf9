"""Each script of examples/upstream shows the fault of its issue without Lockstep, and not with it.
Where the first half fails here, a release has mended the fault: then the script goes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

FOLDER = Path(__file__).parents[1] / "examples" / "upstream"
ON_RANKS = Path(__file__).with_name("upstream_ranks.py")
# what the lines hold of numbers and truth values: without Lockstep, and with it
SHOWN = {
    "accelerate_2016": ("13 64 13", "0 64 0"),
    "lightning_19764": ("15 64 15", "0 64 0"),
    "lightning_20340": ("0.0009", "0.0000"),
    "lightning_21859": ("0 1 2 3 4 2.500", "0 1 2 3 4 2.000"),
    "lightning_6789": ("2 1 0.083", "2 1 0.000"),
    "pytorch_25162": ("0.400 9 0.333", "0.333 9 0.333"),
    "pytorch_31232": ("32 32 0 1", "1 32 0 1"),
    "pytorch_31579": ("49", "0"),
}
BY_COMMANDS = {
    "pytorch_113546": ("False False", "True True 1 17"),
    "pytorch_134803": ("0 False", "1 True"),
}


def started(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=FOLDER,
        text=True,
    )


@pytest.fixture(scope="module")
def printed() -> dict[str, dict[str, str]]:
    """Script -> {"before": its line, "after": its line}. All are started at once: the torchrun
    commands mostly wait.
    """
    scripts = [f"{name}.py" for name in SHOWN]
    runs = {name: started(f"{name}.py") for name in BY_COMMANDS}
    runs[""] = started("-m", "lockstep", "run", "--workers", "2", str(ON_RANKS), *scripts)
    found: dict[str, dict[str, str]] = {}
    outputs = {name: run.communicate()[0] for name, run in runs.items()}
    for name, output in outputs.items():
        assert runs[name].returncode == 0, output
        for line in output.splitlines():
            word, _, rest = line.removeprefix("[0] ").partition(" ")
            if word == "script":
                name = rest
            elif word in ("before:", "after:"):
                found.setdefault(name, {})[word[:-1]] = rest
    assert found.keys() == {path.stem for path in FOLDER.glob("*.py")}
    return found


@pytest.mark.parametrize("script", [*SHOWN, *BY_COMMANDS])
def test_the_fault_is_there_without_lockstep_and_not_with_it(
    script: str, printed: dict[str, dict[str, str]]
) -> None:
    values = tuple(
        " ".join(re.findall(r"\d+(?:\.\d+)?|True|False", printed[script][half]))
        for half in ("before", "after")
    )
    assert values == (SHOWN | BY_COMMANDS)[script]
