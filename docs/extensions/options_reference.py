"""Generate the reference of options from the knobs:
`python docs/extensions/options_reference.py > docs/reference/options.md`.
"""

from __future__ import annotations

from typing import Any

from lockstep.cli.choices import Cluster, RunChoice
from lockstep.config.knob import GROUPS, Field, knobs
from lockstep.config.launching import Launch
from lockstep.config.settings import Config

_HEAD = """# Options

These are the options of `lockstep train`, by group. Other commands take some of them. This page is generated:
`python docs/extensions/options_reference.py > docs/reference/options.md`.

`lockstep train --help` lists the options that most people use, `lockstep train --help-all` all of them.

- **In a file.** `--config FILE` reads the same options from a TOML file, or from a YAML file where PyYAML is installed:
  `sync_every = 8` is `--sync-every 8`, and `set = {lr = 0.05}` is `--set lr=0.05`. The command line overrides the file, and prints one
  line if the two differ. An unknown name, or a value of another type, is an error.
- **From Python.** `lockstep.train(task, sync_every=8)` takes the same names for the groups training, gradients and model split, and for
  epochs, steps, device, checkpoint_every, keep, keep_bytes, checkpoints and allow_changes.
- **A task's parameters.** [Configuration](../guide/configuration.md) explains the values of `--set`.
- **In the run directory.** settings.json holds the options of a run.
"""


def page(*configurations: type[Any]) -> str:
    """Return the page with all knobs of these dataclasses, in a table for each group."""
    fields = [field for each in configurations for field in knobs(each).values()]
    parts = [_HEAD]
    for group in GROUPS:
        if rows := [_row(field) for field in fields if field.knob.group == group]:
            parts.append(
                "\n".join(
                    [
                        f"## {group.capitalize()}",
                        "",
                        "| option | value | meaning |",
                        "|---|---|---|",
                        *rows,
                        "",
                    ]
                )
            )
    return "\n".join(parts)


def _row(field: Field) -> str:
    options = ", ".join(f"`{flag}`" for flag in field.flags)
    value = field.unit or (
        "" if field.type is bool else {int: "whole number", float: "number"}.get(field.type, "text")
    )
    shown = f"`{value}`".replace("|", "\\|") if field.unit else value
    told = field.help.replace("|", "\\|")
    return f"| {options} | {shown} | {told} |"


TRAIN = (RunChoice, Config, Launch, Cluster)

if __name__ == "__main__":
    print(page(*TRAIN), end="")
