"""What cannot be changed in a process that is forked later, and so decides from which server it
is forked, or from none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launcher import interpreter


def test_variables_that_act_as_a_library_starts_are_told_from_others() -> None:
    variables = {
        "OMP_NUM_THREADS": "1",
        "TORCH_LOGS": "+dynamo",
        "PYTHONHASHSEED": "7",
        "TORCHELASTIC_RUN_ID": "x",
        "PATH": "/bin",
        "RANK": "1",
    }
    assert dict(interpreter.acting(variables)) == {
        "OMP_NUM_THREADS": "1",
        "TORCH_LOGS": "+dynamo",
        "PYTHONHASHSEED": "7",
    }


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", "OMP_NUM_THREADS"),
        ('os.environ.setdefault("MKL_NUM_THREADS", "1")', "MKL_NUM_THREADS"),
        ('os.putenv("PYTORCH_CUDA_ALLOC_CONF", "x")', "PYTORCH_CUDA_ALLOC_CONF"),
        ("os.environ.update(\n    A='1', OMP_NUM_THREADS='1')", "OMP_NUM_THREADS"),
        ("os.environ['TOKENIZERS_PARALLELISM'] = 'false'", ""),
        ("print(os.environ.get('OMP_NUM_THREADS'))", ""),
        ("# OMP_NUM_THREADS", ""),
    ],
)
def test_a_script_that_sets_one_itself(tmp_path: Path, line: str, name: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os\n\n{line}\nimport torch\n")
    assert interpreter.set_by(script) == name


def test_what_is_no_text_sets_none(tmp_path: Path) -> None:
    (tmp_path / "archive.zip").write_bytes(b"PK\x03\x04\xff\xfe")
    assert interpreter.set_by(tmp_path / "archive.zip") == ""
    assert interpreter.set_by(tmp_path) == ""


def _says(*flags: str, **environment: str) -> object:
    program = (
        "import json; from lockstep.launcher import interpreter as i; print(json.dumps([i.flags(),"
        f" i.forks({environment!r})]))"
    )
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_all_flags_are_handed_on() -> None:
    assert _says("-O", "-X", "dev", "-X", "int_max_str_digits=5000", "-W", "error") == [
        [
            "-O",
            *(["-B"] if sys.flags.dont_write_bytecode else []),
            "-Werror",
            "-X",
            "dev",
            "-X",
            "int_max_str_digits=5000",
        ],
        True,
    ]


@pytest.mark.parametrize("flags", [["-v"], ["-X", "importtime"]])
def test_who_watches_imports_has_ranks_that_import(flags: list[str]) -> None:
    assert _says(*flags)[1] is False  # type: ignore[index]


def test_and_so_has_who_asks_for_it_by_a_variable() -> None:
    asked = {"PYTHONPROFILEIMPORTTIME": "1"}
    assert _says(**asked)[1] is False  # type: ignore[index]
    assert _says("-E", **asked)[1] is True  # type: ignore[index]
