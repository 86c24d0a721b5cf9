"""Command lines from configurations, their help, and files of options beneath them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from lockstep.cli.choices import RunChoice
from lockstep.cli.options import GivenNames, Only
from lockstep.config.launching import Launch
from lockstep.config.settings import Config
from tests.cli.command import taken
from tests.refused import refused


def asked(choice: RunChoice, config: Config, launch: Launch, given: GivenNames) -> None:
    """A command."""


def test_what_is_not_given_is_the_defaults() -> None:
    found = taken(asked)
    assert (found["choice"], found["config"], found["launch"]) == (RunChoice(), Config(), Launch())
    assert found["given"] == set()


def test_options_become_the_fields_of_their_configuration() -> None:
    line = "-n 2:4 --set a=1 --set b=2 --mesh data=2 --no-compile --exact --stall-after 5"
    found = taken(asked, *line.split())
    choice, config = found["choice"], found["config"]
    assert (choice.workers, choice.overrides) == ("2:4", {"a": "1", "b": "2"})
    assert (str(config.mesh), config.compile, config.exact) == ("data=2", False, True)
    assert found["launch"].stall_after == 5
    assert found["given"] == {"workers", "overrides", "mesh", "compile", "exact", "stall_after"}


def test_only_some_knobs() -> None:
    def some(config: Annotated[Config, Only("steps")]) -> None:
        """A command."""

    assert taken(some, "--steps", "3")["config"] == Config(steps=3)
    with pytest.raises(Exception, match="--epochs"):
        taken(some, "--epochs", "3")


# -- --config ------------------------------------------------------------------------------------


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


TOML = (
    'workers = 2\nsync-every = 8\nmesh = "data=2"\nstall_after = 5\nrun = "runs/mine"\n[set]\nlr ='
    " 0.05\n"
)
YAML = "workers: 2\nsync_every: 8\nmesh: data=2\nstall_after: 5\nrun: runs/mine\nset: {lr: 0.05}\n"


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML)])
def test_a_file_says_what_options_say(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = taken(asked, "--config", written(tmp_path, name, text))
    line = "--workers 2 --sync-every 8 --mesh data=2 --stall-after 5 --run runs/mine --set lr=0.05"
    expected = taken(asked, *line.split())
    assert found["config"] == expected["config"]
    assert found["launch"] == expected["launch"]
    assert (found["choice"].run, found["choice"].overrides) == (Path("runs/mine"), {"lr": "0.05"})
    assert found["given"] == expected["given"]
    assert capsys.readouterr().err == ""


def test_set_may_be_nested_in_a_file(tmp_path: Path) -> None:
    file = written(tmp_path, "a.toml", "set = {optimizer = {lr = 0.1, inner = {on = true}}, b = 1}")
    assert taken(asked, "--config", file)["choice"].overrides == {
        "optimizer.lr": "0.1",
        "optimizer.inner.on": "True",
        "b": "1",
    }


def test_the_command_line_comes_first_and_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, "a.toml", 'sync_every = 8\nreduce = "native"\nsteps = 3\n')
    line = f"--config {file} --sync-every 4 --reduce central --steps 3"
    config = taken(asked, *line.split())["config"]
    assert (config.sync_every, config.reduce) == (4, "central")
    replaced = "sync_every=4 replaces 8; reduce=central replaces native"
    expected = f"{file}: the command line overrides this file: {replaced}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("name", "text", "code", "values"),
    [
        ("a.toml", "sync_evry = 4\n", "unknown-name", {"meant": "did you mean sync_every?"}),
        ("a.toml", 'sync_every = "four"\n', "wrong-value", {"value": "four"}),
        ("a.toml", "mesh = 2\n", "wrong-value", {"value": 2, "expected": "AXIS=N,..."}),
        ("a.toml", "exact = 1\n", "wrong-value", {"value": 1, "expected": "true or false"}),
        ("a.toml", "set = 3\n", "wrong-value", {"name": "overrides", "expected": "KEY=VALUE"}),
        ("a.toml", "steps = \n", "config-file-not-parsed", {"language": "TOML"}),
        ("a.yaml", "[1, 2]\n", "config-file-without-names", {"kind": "list"}),
        ("a.yaml", "a: [\n", "config-file-not-parsed", {"language": "YAML"}),
        ("a.json", "{}\n", "wrong-ending", {"endings": [".toml", ".yaml", ".yml"]}),
        ("a.toml", "#" * (2**20 + 1), "config-file-too-large", {"most": 2**20}),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    tmp_path: Path, name: str, text: str, code: str, values: dict[str, Any]
) -> None:
    file = written(tmp_path, name, text)
    with refused(code, **values) as refusal:
        taken(asked, "--config", file)
    assert file in str(refusal.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with refused("cannot-read", name="--config", file=missing, reason="No such file or directory"):
        taken(asked, "--config", str(missing))


def test_yaml_is_refused_where_its_package_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with refused("missing-extra", package="PyYAML", install="pip install pyyaml"):
        taken(asked, "--config", written(tmp_path, "a.yaml", "steps: 1\n"))
