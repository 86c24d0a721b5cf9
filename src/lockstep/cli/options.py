"""Make options from configurations: if the type of a command's parameter is a dataclass of knobs,
the command has an option for each knob.

    def verify(task: TaskName, config: Annotated[Config, Only("steps", "exact")], names: GivenNames)
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from lockstep.cli.completion import choices, runs
from lockstep.config.knob import GROUPS, Field, knobs, known, pairs, within
from lockstep.config.parallelism import Parallelism
from lockstep.errors import UsageError

_CONFIG = "config_file"
_CONTEXT = "typer_context"
_HELP_ALL = "help_all"
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH"}
_SHORT = 20  # a help with more options than this lists only the common ones


class Only:
    """Annotates a configuration's type with the knobs that are options of the command."""

    def __init__(self, *names: str) -> None:
        self.names = names


@dataclass(frozen=True)
class KnobHelp:
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
    annotations = get_type_hints(command, include_extras=True)
    configurations: dict[str, _Configuration] = {}
    fields: dict[str, Field] = {}
    for name, annotation in annotations.items():
        configuration = _configuration(annotation)
        if configuration is not None:
            configurations[name] = configuration
            fields |= configuration.fields

    def call(**values: Any) -> None:
        context = values.pop(_CONTEXT)
        file = values.pop(_CONFIG, None)
        values.pop(_HELP_ALL, None)
        names = {name for name in values if context.get_parameter_source(name).name != "DEFAULT"}
        options = {name: values[name] for name in names & fields.keys()}
        for name, value in options.items():
            if fields[name].is_mapping:
                options[name] = pairs(value, fields[name].flags[0])
        if file is not None:
            options = below(options, file, fields)
        arguments = {name: value for name, value in values.items() if name not in fields}
        for name, configuration in configurations.items():
            own = options.keys() & configuration.fields
            arguments[name] = configuration.cls(**{option: options[option] for option in own})
        for name, annotation in annotations.items():
            if annotation is GivenNames:
                arguments[name] = GivenNames(names | options.keys())
        command(**arguments)

    parameters = [_parameter(_CONTEXT, typer.Context)]
    for name, parameter in inspect.signature(command).parameters.items():
        if name in configurations:
            parameters += configurations[name].parameters()
        elif annotations[name] is not GivenNames:
            parameters.append(_parameter(name, annotations[name], parameter.default))
    if any(issubclass(configuration.cls, Parallelism) for configuration in configurations.values()):
        parameters.append(_parameter(_CONFIG, _ConfigFile, None))
    if len(parameters) > _SHORT:
        parameters.append(_parameter(_HELP_ALL, _HelpAll, False))
    call.__name__ = command.__name__
    call.__doc__ = command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
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


@dataclass(frozen=True)
class _Configuration:
    """A dataclass with knobs, the knobs that are options of the command, and its own help."""

    cls: Any
    fields: Mapping[str, Field]
    helps: Mapping[str, KnobHelp]

    def parameters(self) -> list[inspect.Parameter]:
        return [_option(field, self.helps.get(name)) for name, field in self.fields.items()]


def _configuration(annotation: Any) -> _Configuration | None:
    """Return the configuration that an annotation describes; None for another type."""
    extras: Sequence[Any] = ()
    if get_origin(annotation) is Annotated:
        annotation, *extras = get_args(annotation)
    if not isinstance(annotation, type) or not is_dataclass(annotation):
        return None
    fields = knobs(annotation)
    helps = {}
    for extra in extras:
        if isinstance(extra, Only):
            fields = {name: fields[name] for name in extra.names}
        else:
            helps[extra.name] = extra
    return _Configuration(annotation, fields, helps)


def _parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _option(field: Field, help: KnobHelp | None) -> inspect.Parameter:
    """Return the parameter that Typer reads for a knob. Typer leaves most types as text, for
    Lockstep's own checks.
    """
    help = help or KnobHelp(field.name, help=field.help)
    unit = help.unit or field.unit
    kind: Any = field.type if field.type in (bool, int, float, Path) else str
    default = field.default
    flags = field.flags
    if field.is_mapping or field.is_repeated:
        kind = list[str]
        default = None
    elif kind is bool and default is None:
        flags = tuple(f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags)
    option = typer.Option(
        *flags,
        metavar=unit or _METAVARS.get(kind),
        show_default=False,
        help=help.help,
        rich_help_panel=field.knob.group,
        autocompletion=runs if field.name == "run" else choices(unit),
    )
    if default is None:
        kind |= None
    return _parameter(field.name, Annotated[kind, option], default)


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
            section = help_section(param, grouped=not short)
            sections.setdefault(section, []).append(help_row(param, *record))
        titles = [f"Options: {group}" for group in GROUPS]
        own_first = not self._names().isdisjoint({"json_file", "json"})
        titles.insert(0 if own_first else len(titles), "Options")
        titles.insert(0, "Arguments")
        for title in sorted(sections, key=titles.index):
            with formatter.section(title):
                formatter.write_dl(sections[title])

    def _names(self) -> set[str]:
        return {str(param.name) for param in self.params}

    def _is_common(self, param: Any) -> bool:
        common = {"help", _HELP_ALL, *getattr(self.callback, "common", ())}
        return param.param_type_name == "argument" or param.name in common


def help_row(param: Any, name: str, text: str) -> tuple[str, str]:
    """Return a row of the help. Defaults read like those of knobs; an argument shows no type."""
    if param.param_type_name == "argument":
        name = name.partition(" <")[0]
        text = text.removesuffix("[required]")
    text = re.sub(r"\s*\[default: (.*)\]$", r" Default: \1.", text)
    return name, re.sub(r"\s*\[required\]$", " Required.", text.rstrip())


def help_section(param: Any, *, grouped: bool) -> str:
    """Return the heading of the help section for a parameter."""
    if param.param_type_name == "argument":
        return "Arguments"
    group = getattr(param, "rich_help_panel", None)
    return f"Options: {group}" if grouped and group in GROUPS else "Options"


def _show_all(ctx: typer.Context, requested: bool) -> None:
    if requested:
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


def below(options: Mapping[str, Any], file: Path, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Merge the options of the command line with those of the file; the former win. Print a line on
    stderr if they differ. Raises UsageError for a file that is not valid.
    """
    by_option = {_name(field): field for field in fields.values()}
    contents = {str(key).replace("-", "_"): value for key, value in _read(file).items()}
    known(by_option, contents, str(file))
    values = {}
    replacements = []
    for option, content in contents.items():
        name = by_option[option].name
        values[name] = _read_value(by_option[option], content, file)
        if name in options and options[name] != values[name]:
            replacements.append(f"{option}={options[name]} replaces {values[name]}")
    if replacements:
        listed = "; ".join(replacements)
        print(f"{file}: the command line overrides this file: {listed}", file=sys.stderr)
    return {**values, **options}


def _name(field: Field) -> str:
    """Return the field's name in a file: the option without its dashes."""
    return field.flags[0].partition("/")[0].removeprefix("--").replace("-", "_")


def _read_value(field: Field, value: Any, file: Path) -> Any:
    if field.is_mapping and isinstance(value, Mapping):
        return dict(_flat(value))
    if field.type is Path and isinstance(value, str):
        return Path(value)
    with within(str(file)):
        if isinstance(value, str) and hasattr(field.type, "read"):
            field.type.read(value)
        else:
            field.check(value)
    return value


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten {"optimizer": {"lr": 0.1}} to the pairs of --set: optimizer.lr, 0.1."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


_ENDINGS = [".toml", ".yaml", ".yml"]


def _read(file: Path) -> dict[str, Any]:
    ending = file.suffix.lower()
    if ending not in _ENDINGS:
        raise UsageError("wrong-ending", option="--config", file=file, endings=_ENDINGS)
    try:
        with file.open(encoding="utf-8") as stream:
            text = stream.read(_LARGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError("cannot-read", name="--config", file=file, reason=reason) from None
    if len(text) > _LARGEST:
        raise UsageError("config-file-too-large", file=file, most=_LARGEST)
    contents = _toml(text, file) if ending == ".toml" else _yaml(text, file)
    if not isinstance(contents, dict):
        raise UsageError("config-file-without-names", file=file, kind=type(contents).__name__)
    return contents


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
        reason = " ".join(str(error).split())
        raise UsageError(
            "config-file-not-parsed", file=file, language="YAML", reason=reason
        ) from None
