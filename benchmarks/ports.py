"""Scripts of public projects, ported with `lockstep.prepare`: the table of examples/ports.

    python benchmarks/ports.py
    python benchmarks/ports.py mnist dcgan

For each port: lines added and removed, the largest difference to the plain script after 40 steps on
the same order (1 and 2 ranks, float32 and float64), whether 1, 2 and 3 ranks have the same bits, and
whether a run that loses a rank and resumes at another size has them too.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "ports_script.py"
EVERY = 2  # steps between two checkpoints


@dataclass(frozen=True, kw_only=True)
class Port:
    """A script of a public project, and its port.

    Args:
        limit: lines that the port may add.
        stepper: lines that a port with a Stepper, a Task or a recipe added; None: not measured.
        args: of the script.
        quiet_args: further ones for the comparison with the plain script.
        equal: whether one process of plain torch is to have the same weights; False with BatchNorm.
        one_forward: compare with micro-batches of this size, a global batch each: the loss has
            statistics of the micro-batch.
        is_double: the script computes in float64 by itself.
        draws_order: the plain script draws its samples with torch.randint.
        resumes: whether the port has `run=`. Without it a run begins again.
        steps: that it takes.
    """

    limit: int
    stepper: int | None
    args: tuple[str, ...] = ()
    quiet_args: tuple[str, ...] = ()
    equal: bool = True
    one_forward: int | None = None
    draws_order: bool = False
    is_double: bool = False
    resumes: bool = True
    steps: int = 40


PORTS = {
    "mnist": Port(limit=8, stepper=33, args=("--save-model",)),
    "nanogpt": Port(limit=15, stepper=43, draws_order=True),
    "cifar": Port(limit=10, stepper=25, equal=False),
    "dcgan": Port(limit=12, stepper=28, equal=False),
    "ppo": Port(limit=12, stepper=16, one_forward=32, resumes=False),
    "mingpt": Port(limit=10, stepper=23),
    "ddpm": Port(limit=8, stepper=21),
    "graphs": Port(limit=6, stepper=None),
    "time_sequence": Port(
        limit=9, stepper=11, steps=8, quiet_args=("--steps", "1"), is_double=True
    ),
    "tabular": Port(limit=7, stepper=11),
    "gcn": Port(limit=10, stepper=18),
    "word_language_model": Port(limit=20, stepper=17, quiet_args=("--dropout", "0")),
    "vae": Port(limit=10, stepper=17),
}


def folder_of(name: str) -> Path:
    return ROOT / "examples" / "ports" / name


def changed_lines(name: str) -> tuple[int, int]:
    """Return how many lines the port adds and removes. Blank lines and spaces do not count."""
    texts: list[list[str]] = []
    for script in ("plain.py", "prepared.py"):
        lines = (folder_of(name) / script).read_text().splitlines()
        texts.append(["".join(line.split()) for line in lines if line.strip()])
    plain, prepared = texts
    added = removed = 0
    for line in difflib.ndiff(plain, prepared):
        added += line.startswith("+")
        removed += line.startswith("-")
    return added, removed


def run(
    name: str,
    folder: Path,
    workers: int,
    *,
    quiet: bool = False,
    double: bool = False,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Run a port in `folder`, and return the last weights of each rank; [] if it fails.

    Args:
        workers: ranks of the prepared script; 0 for the plain one.
        quiet: without dropout, and on the order of one generator.
        double: in float64.
        options: further ones of ports_script.py.
    """
    port = PORTS[name]
    out = folder / "weights"
    out.mkdir(parents=True, exist_ok=True)
    for path in out.iterdir():
        path.unlink()
    args = [*port.args, *(port.quiet_args if quiet else ())]
    asked = json.dumps(
        {
            "out": str(out),
            "quiet": quiet,
            "double": double,
            "draws_order": port.draws_order,
            **options,
        }
    )
    script = folder_of(name) / ("prepared.py" if workers else "plain.py")
    command = [sys.executable]
    if workers:
        command += ["-m", "lockstep", "run", "--workers", str(workers)]
    result = subprocess.run(
        [*command, str(SCRIPT), asked, str(script), *args],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    killed = "kill" in options
    if (result.returncode != 0) != killed:
        raise RuntimeError(
            f"{name}: exit status {result.returncode}\n{result.stdout}{result.stderr}"
        )
    return [torch.load(path) for path in sorted(out.iterdir())]


def sha_of(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def difference(name: str, folder: Path, *, double: bool = False) -> float:
    """Return the largest difference of a weight on 1 and 2 ranks to that of the plain script, without
    dropout.
    """
    port = PORTS[name]
    prepare = {} if port.one_forward is None else {"micro_batch": port.one_forward}
    options: dict[str, Any] = {"quiet": True, "double": double and not port.is_double}
    (plain,) = run(name, folder / "plain", 0, **options)
    largest = 0.0
    for workers in (1, 2):
        for state in run(name, folder / f"{workers}", workers, prepare=prepare, **options):
            for key, tensor in plain.items():
                largest = max(largest, float((state[key] - tensor).abs().max()))
    return largest


def exact_shas(name: str, folder: Path) -> set[str]:
    """Return the SHA-256 of the weights of each rank of 1, 2 and 3, with exact=True."""
    shas = set()
    for workers in (1, 2, 3):
        for state in run(name, folder / f"{workers}", workers, prepare={"exact": True}):
            shas.add(sha_of(state))
    return shas


def killed_and_resumed(name: str, folder: Path) -> set[str]:
    """Kill a rank at a step drawn with the name, resume with another number of ranks, and return the
    SHA-256 of each rank's weights.
    """
    port = PORTS[name]
    draw = random.Random(name)
    before, after = draw.sample((1, 2, 3), 2)
    prepare = {"exact": True, "checkpoint_every": EVERY}
    kill = [draw.randrange(before), draw.randrange(port.steps // 2, port.steps)]
    run(name, folder, before, prepare=prepare, kill=kill)
    if port.resumes and not list(folder.glob("runs/*/checkpoints/step-*")):
        raise RuntimeError(f"{name}: no checkpoint before {kill}")
    return {sha_of(state) for state in run(name, folder, after, prepare=prepare)}


def row(name: str, folder: Path) -> str:
    port = PORTS[name]
    added, removed = changed_lines(name)
    cells = [name, f"+{added} -{removed}", "" if port.stepper is None else f"+{port.stepper}"]
    for double in (False, True):
        if not port.equal:
            cells.append("BatchNorm")
        elif port.is_double and not double:
            cells.append("")
        else:
            cells.append(f"{difference(name, folder / f'double-{double}', double=double):.1e}")
    shas = exact_shas(name, folder / "exact")
    cells.append("yes" if len(shas) == 1 else "no")
    resumed = killed_and_resumed(name, folder / "killed")
    cells.append(("yes" if port.resumes else "starts again") if resumed == shas else "no")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", nargs="*", default=list(PORTS), help="default: all")
    print("| port | lines | with a Stepper | float32 | float64 | 1 = 2 = 3 ranks | kill, resume |")
    print("|---|---|---|---|---|---|---|")
    for name in parser.parse_args().ports:
        with tempfile.TemporaryDirectory() as folder:
            print(row(name, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
