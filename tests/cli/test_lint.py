"""`lockstep lint`: lines on stdout, JSON on request, and exit codes that a pre-commit hook can
use.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.app import app
from lockstep.errors import UsageError

WRONG = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"


@pytest.fixture
def scripts(tmp_path: Path) -> tuple[str, str, str]:
    clean, wrong, broken = tmp_path / "clean.py", tmp_path / "wrong.py", tmp_path / "broken.py"
    clean.write_text("print(1)\n")
    wrong.write_text(WRONG)
    broken.write_text("def f(:\n")
    return str(clean), str(wrong), str(broken)


def test_clean_is_one_line_and_0(scripts: tuple[str, str, str]) -> None:
    done = CliRunner().invoke(app, ["lint", scripts[0]])
    assert (done.exit_code, done.output) == (0, "no mistakes found in 1 file\n")
    assert (
        CliRunner().invoke(app, ["lint", scripts[0], scripts[0]]).output
        == "no mistakes found in 2 files\n"
    )


def test_a_finding_is_a_line_and_1(scripts: tuple[str, str, str]) -> None:
    done = CliRunner().invoke(app, ["lint", scripts[0], scripts[1]])
    assert done.exit_code == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith(
        f"{scripts[1]}:3: rank-conditional-collective: only rank 0 would reach dist.barrier()"
    )


def test_unreadable_is_a_sentence_and_2_and_the_others_are_still_checked(
    scripts: tuple[str, str, str],
) -> None:
    done = CliRunner().invoke(app, ["lint", scripts[2], scripts[1]])
    assert done.exit_code == 2
    assert done.stdout.count("\n") == 1
    assert done.stderr.startswith(f"error: {scripts[2]}:1 is not valid Python: ")


def test_json(scripts: tuple[str, str, str], tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert CliRunner().invoke(app, ["lint", *scripts, "--json", str(file)]).exit_code == 2
    content = json.loads(file.read_text())
    (finding,), (sentence,) = content["findings"], content["unreadable"]
    assert (finding["file"], finding["line"], finding["rule"]) == (
        scripts[1],
        3,
        "rank-conditional-collective",
    )
    assert set(finding) == {"file", "line", "rule", "message"}
    assert scripts[2] in sentence


def test_json_of_nothing(scripts: tuple[str, str, str], tmp_path: Path) -> None:
    assert (
        CliRunner()
        .invoke(app, ["lint", scripts[0], "--json", str(tmp_path / "found.json")])
        .exit_code
        == 0
    )
    assert json.loads((tmp_path / "found.json").read_text()) == {"findings": [], "unreadable": []}


def test_json_that_cannot_be_written(scripts: tuple[str, str, str], tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["lint", scripts[0], "--json", str(tmp_path / "missing" / "found.json")]
    )
    assert isinstance(done.exception, UsageError)
    assert "cannot be written: No such file" in str(done.exception)


def test_fix_writes_what_is_safe_and_reports_the_rest(scripts: tuple[str, str, str]) -> None:
    port = 'os.environ["MASTER_PORT"] = "1234"\n'
    Path(scripts[1]).write_text(port + WRONG)
    Path(scripts[0]).write_text(port)
    done = CliRunner().invoke(app, ["lint", "--fix", *scripts[:2]])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[:2] == [f"{scripts[0]}: 1 fixed", f"{scripts[1]}: 1 fixed"]
    assert done.stdout.count("\n") == 3
    assert Path(scripts[1]).read_text() == 'os.environ.setdefault("MASTER_PORT", "1234")\n' + WRONG
    assert (
        CliRunner().invoke(app, ["lint", "--fix", scripts[0]]).output
        == "no mistakes found in 1 file\n"
    )


def test_without_fix_nothing_is_written(scripts: tuple[str, str, str]) -> None:
    text = 'os.environ["MASTER_PORT"] = "1234"\n'
    Path(scripts[0]).write_text(text)
    assert CliRunner().invoke(app, ["lint", scripts[0]]).exit_code == 1
    assert Path(scripts[0]).read_text() == text


def test_without_libcst_it_says_what_to_install(
    scripts: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("lockstep.tools.lint")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "libcst", None)  # as if it were not installed
    done = CliRunner().invoke(app, ["lint", scripts[0]])
    assert isinstance(done.exception, UsageError)
    assert done.exception.code == "missing-extra"
    assert "[lint]'" in str(done.exception)


def test_help_imports_no_libcst() -> None:
    code = (
        "import sys; from lockstep.cli.app import app; app(['lint', '--help'],"
        " standalone_mode=False); assert not {'torch', 'libcst'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_it_imports_no_torch(scripts: tuple[str, str, str]) -> None:
    code = (
        "import sys; from lockstep.tools.lint import check_file; from pathlib import Path;"
        " check_file(Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, scripts[1]], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
