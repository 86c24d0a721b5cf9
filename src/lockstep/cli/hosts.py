"""The options of `lockstep run` and `lockstep train` about several hosts, and what every host does with them."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import lockstep
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.launcher.hosts.plan import Plan
    from lockstep.launcher.watch import Stalls
    from lockstep.settings import Settings
    from lockstep.training.run_directory import RunDirectory

Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes", metavar="N|N:M", show_default=False, help="Hosts; the same command is given on each. N:M: go on as long as there are N."
    ),
]
Meet = Annotated[
    str | None,
    typer.Option(
        "--meet", metavar="HOST[:PORT]", show_default=False, help="The first host, where the others meet it; default port: 29400."
    ),
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", metavar="K", show_default=False, help="This host's number; default: in the order of arrival.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token", metavar="FILE", show_default=False, help="A secret that the hosts share, at least 32 bytes in hex."),
]
WorkersPerNode = Annotated[
    int | None, typer.Option("--workers-per-node", metavar="K", show_default=False, help="Ranks of each host, in place of --workers.")
]
JoinTimeout = Annotated[
    float | None,
    typer.Option("--join-timeout", metavar="SECONDS", show_default=False, help="How long hosts wait for late ones; default: 300."),
]


def run_script(
    plan: Plan, command: list[str], *, module: bool, logs: Path | None, environment: Mapping[str, str], debug: bool, stalls: Stalls
) -> int:
    """`lockstep run` on one of several hosts. Returns the exit code."""
    from lockstep.launcher.hosts.messages import Share
    from lockstep.launcher.hosts.together import Run, run_over_hosts
    from lockstep.launcher.supervise import Outcome, Target, supervise

    name, args = command[0], command[1:]
    target = Target(module=name, args=args) if module else Target(script=name, args=args)

    def start(share: Share, network: Mapping[str, str]) -> Outcome:
        variables = {**network, **environment}
        return supervise(target, share.roll.share, logs=logs, environment=variables, debug=debug, stalls=stalls, share=share)

    facts = {**_versions(), **_of_plan(plan), "the command": " ".join(command)}
    return run_over_hosts(replace(plan, facts=facts), Run(start=start))


def train_over_hosts(
    plan: Plan,
    settings: Settings,
    claim: Callable[[], RunDirectory],
    run: Path | None,
    finished: Callable[[RunDirectory], None],
    *,
    environment: Mapping[str, str],
    debug: bool,
    stalls: Stalls,
) -> int:
    """`lockstep train` on one of several hosts. The one that holds the meeting claims the run directory; all must see it. Returns the exit code."""
    from lockstep.launcher.hosts.messages import Share
    from lockstep.launcher.hosts.together import Run, run_over_hosts
    from lockstep.launcher.supervise import Outcome, Target, supervise
    from lockstep.training.run_directory import RunDirectory

    held: list[RunDirectory] = []
    here: list[RunDirectory] = []  # where this host finds it

    def opened() -> Mapping[str, str]:
        held.append(claim())
        return {"run": str(held[0].path.absolute()), "mark": held[0].leave_mark()}

    def prepare(size: int) -> None:
        held[0].grow.unlink(missing_ok=True)
        held[0].wanted.unlink(missing_ok=True)
        replace(settings, workers=size, grow_if_wanted=plan.elastic).write(held[0].path)

    def start(share: Share, network: Mapping[str, str]) -> Outcome:
        here[:] = [RunDirectory.shared(Path(share.roll.about["run"]), share.roll.about["mark"])]
        target = Target(module="lockstep.training.worker", args=[str(here[0].path)])
        variables, logs = {**network, **environment}, here[0].path.absolute()
        return supervise(
            target, share.roll.share, logs=logs, console="first", environment=variables, debug=debug, heeds=True, stalls=stalls, share=share
        )

    command = {name: str(value) for name, value in asdict(settings).items() if name != "workers"}
    facts = {**_versions(), **_of_plan(plan), **command, "--run": "not given" if run is None else str(run)}
    try:
        return run_over_hosts(
            replace(plan, facts=facts),
            Run(
                start=start,
                open=opened,
                prepare=prepare,
                grow=lambda about: RunDirectory.of_launcher(Path(about["run"])).wanted.touch(),
                grown=lambda: here[0].grow.exists(),
                finished=lambda: finished(here[0]),
            ),
        )
    finally:
        for directory in held:
            directory.release()


def fits_here(plan: Plan, settings: Settings) -> None:
    """Raises UsageError where this host has fewer GPUs than it shall have ranks."""
    from lockstep.cli.hardware import fitted

    try:
        fitted(settings.on_one_host(plan.workers or 1), count_workers=plan.workers is None)
    except UsageError as error:
        raise UsageError(str(error).replace("--workers", "--workers-per-node")) from None


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"lockstep": lockstep.__version__, "torch": version("torch"), "Python": ".".join(platform.python_version_tuple()[:2])}


def _of_plan(plan: Plan) -> dict[str, str]:
    return {
        "--nodes": plan.nodes,
        "--workers" if not plan.elastic else "--workers-per-node": "not given" if plan.workers is None else _shown(plan),
        "--max-restarts": str(plan.restarts),
        "--on-stall restart": "given" if plan.after_stalls else "not given",
    }


def _shown(plan: Plan) -> str:
    assert plan.workers is not None
    return str(plan.workers) if plan.elastic else f"{plan.workers * plan.most} ({plan.workers} a host)"
