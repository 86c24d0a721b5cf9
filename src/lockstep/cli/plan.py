"""`lockstep plan`: how long a step would take on ranks and a network that need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli import plan_methods, plan_model, plan_task
from lockstep.cli.plan_options import Asked, check_together


def plan(
    context: typer.Context,
    task: Annotated[
        str | None, typer.Argument(metavar="[TASK]", help="digits, text, or a Python file whose task() returns a lockstep.Task.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option("--workers", "-n", metavar="N|N,N|N..N", show_default=False, help="Ranks: 512, or 1,2,4, or powers of two: 1..4096."),
    ] = None,
    network: Annotated[
        str,
        typer.Option(metavar="NAME|US,RATE|FILE", help="100Mbit, 25GbE, NVLink+IB, free, 500,50Mbit; what bench collectives wrote; here."),
    ] = "1Gbit",
    nodes_of: Annotated[int, typer.Option(metavar="N", help="Ranks of a node, which share its way out.")] = 1,
    ranks_per_host: Annotated[
        str | None,
        typer.Option(metavar="N|all", show_default=False, help="Ranks that share the cores of one host like this; default: --nodes-of."),
    ] = None,
    weak: Annotated[bool, typer.Option("--weak/--strong", help="Each rank keeps its share, or the task its global batch.")] = False,
    reduce: Annotated[str, typer.Option(help="How gradients are summed, as for train.")] = "auto",
    compress: Annotated[str | None, typer.Option(show_default=False, help="In how many bits they travel, as for train.")] = None,
    update: Annotated[str, typer.Option(help="replicated, sharded or server, as for train.")] = "replicated",
    staleness: Annotated[str | None, typer.Option(show_default=False, help="Of the server, as for train.")] = None,
    sync_every: Annotated[int | None, typer.Option(metavar="H", show_default=False, help="Local steps, as for train.")] = None,
    outer: Annotated[str | None, typer.Option(show_default=False, help="What a meeting does, as for train.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS=N,...",
            show_default=False,
            help="Such as shard=8; data takes the ranks that are left. pipeline, tensor: with --model.",
        ),
    ] = None,
    mtbf: Annotated[
        float | None, typer.Option(metavar="HOURS", show_default=False, help="Between two failures of one rank: foretells goodput.")
    ] = None,
    checkpoint_cost: Annotated[float, typer.Option(metavar="S", help="By which a checkpoint holds up the training. With --mtbf.")] = 10.0,
    restart: Annotated[float, typer.Option(metavar="S", help="From a failure until the work goes on. With --mtbf.")] = 60.0,
    storage: Annotated[
        float | None, typer.Option(metavar="SAMPLES/S", show_default=False, help="That a storage gives all ranks together.")
    ] = None,
    loader_workers: Annotated[int, typer.Option(help="Processes of each rank that load data; 0: the rank itself.")] = 0,
    seconds: Annotated[float, typer.Option(help="That a rank is profiled, warming up aside.")] = 30.0,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Measure nothing: take what --save-profile wrote.")
    ] = None,
    save_profile: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Keep what was measured.")] = None,
    noise_scale: Annotated[
        bool, typer.Option("--noise-scale", help="Measure beyond which global batch more workers stop helping.")
    ] = False,
    methods: Annotated[bool, typer.Option("--methods", help="Compare the ways to make one training of the ranks' work.")] = False,
    step_ms: Annotated[
        float | None, typer.Option("--step-ms", metavar="MS", show_default=False, help="With --methods: what a rank computes in a step.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="With --methods: what benchmarks/slow_link.py --json wrote, set beside it."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="In place of a task: resnet50, vgg16, gpt3-175b, ...; with --device."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", show_default=False, help="With --model: p100, v100, rtx4090, a100-80g, h100, h200.")
    ] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", show_default=False, help="With --model: samples of a device in a step.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", show_default=False, help="A parameter of task(); may be repeated.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", show_default=False, help="Write the figures to this file, too.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw samples/s over workers, .png or .svg.")
    ] = None,
) -> None:
    """Foretell the step of TASK, or of a --model of the table, for any number of workers on any network.

    A rank of the task is profiled here: its phases, and when each bucket of gradients is complete. The step is then simulated: buckets go over
    the link one after the other, the slowest of W ranks is waited for, loaders and storage are shared.
    """
    asked = Asked(**context.params)  # every option by its name
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    kind = check_together(asked, given)
    {"methods": plan_methods.run, "model": plan_model.run, "task": plan_task.run}[kind](asked)
