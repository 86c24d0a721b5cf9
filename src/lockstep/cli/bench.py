"""`lockstep bench`: measurements, as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lockstep.errors import UsageError

app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)


@app.command("sampler")
def sampler(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, as JSON, too.")] = None,
    largest_torch: Annotated[
        int, typer.Option(metavar="N", help="Samples up to which torch's DistributedSampler is measured, at 64 bytes of memory each.")
    ] = 10**8,
) -> None:
    """Start-up time, memory and time per index of a shuffled order beside torch's DistributedSampler, each in a fresh process."""
    from lockstep.measure import sampler as measured

    found = list(measured.rows(largest_torch))
    print(measured.table(found))
    _write(json_file, {"rows": [row.as_json() for row in found]}, "--json")


@app.command("collectives")
def collectives(
    workers: Annotated[int, typer.Option("--workers", "-n", help="Ranks on this host.")] = 2,
    sizes: Annotated[str, typer.Option(metavar="FROM..TO", help="Bytes, from line to line four times as many.")] = "4K..64M",
    collective: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="Such as all_reduce, broadcast, all_gather.")] = "all_reduce",
    algorithms: Annotated[str, typer.Option(metavar="NAME[,NAME]", help="all, or some of native, auto, central, ring, tree, ...")] = "all",
    runs: Annotated[
        int | None, typer.Option(show_default=False, help="Timed runs of each; default: what fits in about a quarter of a second.")
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help='Measure everything and write which algorithm "auto" shall choose.'),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the figures to this file, too.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw time against size, .png or .svg.")] = None,
) -> None:
    """Time every algorithm beside the backend's own, in turns, each run checked. Columns as nccl-tests define them."""
    from lockstep.collectives.algorithms import algorithms_of
    from lockstep.measure import collectives as measured

    every = _sizes(sizes)
    if tune is not None:
        tuning, found = measured.tune(workers, every, str(tune))
        _write(tune, tuning.as_json(), "--tune")
    else:
        found = []
        for kind in collective.split(","):
            every_name = ["native", *algorithms_of(kind)] if kind in measured.KINDS else []
            names = every_name if algorithms == "all" else algorithms.split(",")
            measured.check(kind, names)
            found += measured.measure(kind, workers, every, names, runs)  # type: ignore[arg-type]
    print(measured.table(found))
    if tune is not None:
        print(f"\nwritten to {tune}: use it with LOCKSTEP_TUNING={tune}, or lockstep.init(tuning={str(tune)!r})")
    _write(json_file, {"rows": [row.as_json() for row in found]}, "--json")
    if plot is not None:
        measured.plot(found, str(plot))


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def _sizes(text: str) -> list[int]:
    """`4K..64M`: 4096, 16384, ...; a single size is itself."""
    ends = [_bytes(part, text) for part in text.split("..")]
    if len(ends) > 2 or ends[0] > ends[-1]:
        raise UsageError(f"--sizes {text}: give FROM..TO, such as 4K..64M")
    found = [ends[0]]
    while found[-1] * 4 <= ends[-1]:
        found.append(found[-1] * 4)
    return found


def _bytes(part: str, text: str) -> int:
    number, unit = (part[:-1], part[-1].upper()) if part and not part[-1].isdigit() else (part, "")
    if not number.isdigit() or unit not in _UNITS or int(number) == 0:
        raise UsageError(f"--sizes {text}: {part!r} is no number of bytes; give FROM..TO, such as 4K..64M")
    return int(number) * _UNITS[unit]


def _write(file: Path | None, what: object, option: str) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be written: {error.strerror or error}") from error
