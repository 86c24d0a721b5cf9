"""Make options from configurations: if the type of a command's parameter is a dataclass of knobs,
the command has an option for each knob.

    def verify(task: TaskName, config: Annotated[Config, Only("steps", "exact")], given: GivenNames)
    -> None: ...

A command with knobs of a training also reads them from a file, with --config. The file uses the
names of the options, and the command line overrides it.

    sync_every = 8                  as --sync-every 8
    set = {lr = 0.05}               as --set lr=0.05
    set = {optimizer = {lr = 0.05}} as --set optimizer.lr=0.05
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from lockstep.cli.completion import choices, runs
from lockstep.config.knob import GROUPS, Field, knobs, known, pairs
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError

_CONFIG, _CONTEXT, _HELP_ALL = "config_file", "typer_context", "help_all"
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH"}
_SHORT = 20  # a help with more options than this lists only the common ones


class Only:
    """Annotates a configuration's type with the knobs that are options of the command."""

    def __init__(self, *names: str) -> None:
        self.names = names


@dataclass(frozen=True)
class Says:
    """Annotates a configuration's type with the command's own help for a knob, if the knob does
    less there than its field says.
    """

    name: str
    _: KW_ONLY
    help: str
    unit: str = ""


class GivenNames(frozenset[str]):
    """The names of the knobs that were given, on the command line or in a file. A command gets them
    with a parameter of this type.
    """


def spread(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with an option for each knob, in the form that Typer reads."""
    hints = get_type_hints(command, include_extras=True)
    configurations = {
        name: found for name, hint in hints.items() if (found := _configuration(hint)) is not None
    }
    fields = {name: field for _, taken in configurations.values() for name, field in taken.items()}
    takes_file = any(issubclass(cls, Parallelism) for cls, _ in configurations.values())

    def call(**values: Any) -> None:
        context = values.pop(_CONTEXT)
        file = values.pop(_CONFIG, None)
        values.pop(_HELP_ALL, None)
        given = {name for name in values if context.get_parameter_source(name).name != "DEFAULT"}
        chosen = {name: _value(fields[name], values[name]) for name in given & fields.keys()}
        if file is not None:
            chosen = below(chosen, file, fields)
        for name, (cls, taken) in configurations.items():
            values[name] = cls(**{each: value for each, value in chosen.items() if each in taken})
        values |= {
            name: GivenNames(given | chosen.keys())
            for name, hint in hints.items()
            if hint is GivenNames
        }
        command(**{name: value for name, value in values.items() if name not in fields})

    parameters = [_parameter(_CONTEXT, typer.Context)]
    for name, parameter in inspect.signature(command).parameters.items():
        if name in configurations:
            said = {each.name: each for each in get_args(hints[name]) if isinstance(each, Says)}
            parameters += [
                _option(field, said.get(field.name)) for field in configurations[name][1].values()
            ]
        elif hints[name] is not GivenNames:
            parameters.append(_parameter(name, hints[name], parameter.default))
    if takes_file:
        parameters.append(_parameter(_CONFIG, _ConfigFile, None))
    if len(parameters) > _SHORT:
        parameters.append(_parameter(_HELP_ALL, _HelpAll, False))
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.common = {name for name, field in fields.items() if field.knob.common}  # type: ignore[attr-defined]
    return call


def command_of(app: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function a command of `app`, with its knobs as options."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        app.command(name, cls=GroupedCommand)(spread(function))
        return function

    return add


def option_name(name: str) -> str:
    """Return the option of a parameter, as the user types it."""
    return {"overrides": "--set", "json_file": "--json"}.get(name, f"--{name.replace('_', '-')}")


def _configuration(hint: Any) -> tuple[Any, Mapping[str, Field]] | None:
    """Return a dataclass with knobs and the knobs that are options; None for another type."""
    cls, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not isinstance(cls, type) or not is_dataclass(cls):
        return None
    only = next((each.names for each in extras if isinstance(each, Only)), tuple(knobs(cls)))
    return cls, {name: knobs(cls)[name] for name in only}


def _parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _option(field: Field, said: Says | None) -> inspect.Parameter:
    """Return the parameter that Typer reads for a knob. Typer leaves most types as text, for
    Lockstep's own checks.
    """
    said = said or Says(field.name, help=field.help)
    kind = next((each for each in (bool, int, float, Path) if field.type is each), str)
    default, flags = field.default, field.flags
    if field.is_mapping or field.is_repeated:
        kind, default = list[str], None
    elif kind is bool and field.default is None:
        flags = tuple(f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags)
    option = typer.Option(
        *flags,
        metavar=said.unit or field.unit or _METAVARS.get(kind),
        show_default=False,
        help=said.help,
        rich_help_panel=field.knob.group,
        autocompletion=runs if field.name == "run" else choices(said.unit or field.unit),
    )
    return _parameter(
        field.name, Annotated[kind | None if default is None else kind, option], default
    )


def _value(field: Field, given: Any) -> Any:
    """Convert the value of an option to the form of the configuration."""
    if field.is_mapping:
        return pairs(given, field.flags[0])
    return given


class GroupedCommand(TyperCommand):
    """A command with help in groups. If it has --help-all, `--help` lists only common options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and a section for each group of options."""
        short = _HELP_ALL in self._names() and not ctx.meta.get(_HELP_ALL)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None or (short and not self._is_common(param)):
                continue
            sections.setdefault(help_section(param, grouped=not short), []).append(
                help_row(param, *record)
            )
        titles = ["Arguments", *(f"Options: {group}" for group in GROUPS)]
        own = "json_file" in self._names() or "json" in self._names()
        titles.insert(1 if own else len(titles), "Options")
        for title in sorted(sections, key=titles.index):
            with formatter.section(title):
                formatter.write_dl(sections[title])

    def _names(self) -> set[str]:
        return {str(each.name) for each in self.params}

    def _is_common(self, param: Any) -> bool:
        named = {"help", _HELP_ALL, *getattr(self.callback, "common", ())}
        return param.param_type_name == "argument" or param.name in named


def help_row(param: Any, name: str, told: str) -> tuple[str, str]:
    """Return a row of the help. Defaults read like those of knobs; an argument shows no type."""
    if param.param_type_name == "argument":
        name, told = name.partition(" <")[0], told.removesuffix("[required]")
    told = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", told)
    return name, re.sub(r"\s*\[required\]$", " Required.", told.rstrip())


def help_section(param: Any, *, grouped: bool) -> str:
    """Return the heading of the help section for a parameter."""
    if param.param_type_name == "argument":
        return "Arguments"
    group = getattr(param, "rich_help_panel", None)
    return f"Options: {group}" if grouped and group in GROUPS else "Options"


def _show_all(ctx: typer.Context, asked: bool) -> None:
    if asked:
        ctx.meta[_HELP_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


_ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        rich_help_panel="run",
        help="Read options from a TOML or YAML file. The command line overrides them.",
    ),
]
_HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        callback=_show_all,
        help="Show all options, in groups, and exit.",
    ),
]


_LARGEST = 2**20  # bytes


def below(given: Mapping[str, Any], file: Path, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Merge given options with those of the file; given ones win. Print a line on stderr if they
    differ. Raises UsageError for a file that is not valid.
    """
    by_option = {_name(field): field for field in fields.values()}
    found = {str(key).replace("-", "_"): value for key, value in _read(file).items()}
    known(by_option, found, str(file))
    values = {
        by_option[key].name: _read_value(by_option[key], value, file)
        for key, value in found.items()
    }
    beaten = [name for name in values if name in given and values[name] != given[name]]
    if beaten:
        told = "; ".join(
            f"{_name(fields[name])}={given[name]} replaces {values[name]}" for name in beaten
        )
        print(f"{file}: the command line overrides this file: {told}", file=sys.stderr)
    return {**values, **given}


def _name(field: Field) -> str:
    """Return the field's name in a file: the option without its dashes."""
    return field.flags[0].partition("/")[0].removeprefix("--").replace("-", "_")


def _read_value(field: Field, value: Any, file: Path) -> Any:
    if field.is_mapping and isinstance(value, Mapping):
        return dict(_flat(value))
    if field.type is Path and isinstance(value, str):
        return Path(value)
    try:
        field.check(
            field.type.read(value)
            if isinstance(value, str) and hasattr(field.type, "read")
            else value
        )
    except UsageError as error:
        raise error.within(str(file)) from None
    return value


def _flat(values: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Flatten {"optimizer": {"lr": 0.1}} to the pairs of --set: optimizer.lr, 0.1."""
    for key, each in values.items():
        if isinstance(each, Mapping):
            yield from _flat(each, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(each)


def _read(file: Path) -> dict[str, Any]:
    kind = file.suffix.lower()
    if kind not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            "wrong-ending", option="--config", file=file, endings=[".toml", ".yaml", ".yml"]
        )
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_LARGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError("cannot-read", name="--config", file=file, reason=reason) from None
    if len(text) > _LARGEST:
        raise UsageError("config-file-too-large", file=file, most=_LARGEST)
    found = _toml(text, file) if kind == ".toml" else _yaml(text, file)
    if not isinstance(found, dict):
        raise UsageError("config-file-without-names", file=file, kind=type(found).__name__)
    return found


def _toml(text: str, file: Path) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            "config-file-not-parsed", file=file, language="TOML", reason=error
        ) from None


def _yaml(text: str, file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "missing-extra", what=f"--config {file}", package="PyYAML", install="pip install pyyaml"
        ) from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise UsageError(
            "config-file-not-parsed",
            file=file,
            language="YAML",
            reason=" ".join(str(error).split()),
        ) from None
