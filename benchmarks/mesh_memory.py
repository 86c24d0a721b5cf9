"""What a rank holds at its peak on a mesh: a deep `text` on one process, in two stages, cut in two,
and with its parameters sharded.

    python benchmarks/mesh_memory.py --depth 12

Memory is what the process has grown by since before the model was built (resident pages, their
high-water mark), after a small training has loaded everything that is imported late; "state" is
parameters, gradients and the optimizer's tensors, counted. One intra-op thread a rank.
"""

from __future__ import annotations

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

ROWS = (
    ("one process", None, "1f1b"),
    ("pipeline=2 naive", "pipeline=2", "naive"),
    ("pipeline=2 1f1b", "pipeline=2", "1f1b"),
    ("pipeline=2 gpipe", "pipeline=2", "gpipe"),
    ("tensor=2", "tensor=2", "1f1b"),
    ("shard=2", "shard=2", "1f1b"),
)


def rank(
    world: Any, mesh: str | None, schedule: str, given: dict[str, int], steps: int
) -> dict[str, float]:
    """MiB that this rank grew by, and MiB of its state."""
    import gc

    from lockstep.config.mesh import Mesh
    from lockstep.config.settings import Settings
    from lockstep.tasks import text
    from lockstep.training.loop import Training

    pipeline: dict[str, Any] = (
        {"schedule": schedule, "split": "parameters"} if mesh and "pipeline" in mesh else {}
    )
    settings = Settings(
        task="text",
        workers=world.size,
        mesh=None if mesh is None else Mesh.read(mesh),
        steps=steps,
        **pipeline,
    )

    def walked(task: Any, count: int) -> Training:
        training = Training(task, settings, world, None)
        for epoch in training.loader.epochs(1):
            for _, window in zip(range(count), epoch, strict=False):
                training.step(window)
        return training

    small = {"width": 16, "depth": 4, "length": 8, "train_bytes": 4000, "eval_bytes": 600}
    walked(text.task(**small), 2)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _kib("VmRSS")
    training = walked(text.task(**given), steps)
    grown = _kib("VmHWM") - before
    parameters = list(training.stepper.model.parameters())
    state = [
        value
        for each in training.optimizer.state.values()
        for value in each.values()
        if hasattr(value, "nbytes") and value.dim()
    ]
    held = sum(each.nbytes for each in [*parameters, *state]) + sum(
        each.grad.nbytes for each in parameters if each.grad is not None
    )
    return {
        "grown": grown / 1024,
        "parameters and optimizer": sum(each.nbytes for each in [*parameters, *state]) / 2**20,
        "state": held / 2**20,
    }


def _kib(field: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=12, help="blocks; `text` has 3")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from lockstep.testing import run_ranks

    given = {
        "depth": options.depth,
        "width": options.width,
        "micro_batch": options.micro_batch,
        "train_bytes": 60_000,
        "eval_bytes": 600,
    }
    rows: list[dict[str, Any]] = []
    print(
        f"text depth={options.depth} width={options.width} micro_batch={options.micro_batch}: MiB,"
        " of the rank that has most"
    )
    print(f"{'':<20}{'grown':>8}{'of one':>8}{'parameters + optimizer':>25}{'of one':>8}")
    for name, mesh, schedule in ROWS:
        ranks = run_ranks(
            rank,
            2 if mesh else 1,
            (mesh, schedule, given, options.steps),
            timeout=timedelta(minutes=5),
        )
        most = {key: max(each[key] for each in ranks) for key in ranks[0]}
        rows.append({"name": name, **most, "ranks": ranks})
        one = rows[0]
        print(
            f"{name:<20}{most['grown']:>8.1f}{most['grown'] / one['grown']:>8.2f}"
            f"{most['parameters and optimizer']:>25.2f}{most['parameters and optimizer'] / one['parameters and optimizer']:>8.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
