"""Every example runs on two ranks, and as a plain script, and prints what it promises."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.rest

EXAMPLES = Path(__file__).parents[1] / "examples"
ONE_AFTER_ANOTHER = Path(__file__).with_name("upstream_ranks.py")
# on the same ranks, one after another
TOGETHER = {
    "sampler.py": [
        "interleaved: rank 0 [0, 2, 4, 6, 8]  rank 1 [1, 3, 5, 7, 9]",
        "blocks: rank 0 [0, 1, 2, 3, 4]",
        "together on 10 of 10",
    ],
    "gradients_by_hand.py": ["over 2 ranks"],
    "data_parallel.py": ["epoch 4: loss 0."],
    "accumulation.py": ["the last step had 44 samples"],
    "dcp_load.py": ["2 ranks, 5 steps: the same weights, sharded and saved again"],
    "no_sync.py": ["stepped after 2 micro-batches a rank, loss "],
    "replicas.py": [
        "central: 4 replicas and one process differ by less than 1e-12",
        "ring: 4 replicas and one process differ by less than 1e-12",
    ],
}
# in processes of their own
ALONE = {
    "accelerate_loop.py": ["2 ranks: equal=True", "weights -1.65367"],
    "hf_trainer.py": ["2 ranks, 16 steps: same=True", "loss 4.2017, 2.6321"],
    "lightning_trainer.py": ["2 ranks, 24 steps: equal=True", "weights -1.65367"],
}
ELSEWHERE = {"averaging.py", "mnist_idx.py", "setup_and_train.py"}
"""In tests of their own; and those of tests/test_recipes.py."""
RECIPES = {"gan.py", "gradient_checkpointing.py", "lora.py", "packing.py", "weight_average.py"}


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ON_TWO_RANKS = ("-m", "lockstep", "run", "--workers", "2")


def test_examples_run_on_two_ranks(tmp_path: Path) -> None:
    everything = {path.name for path in EXAMPLES.glob("*.py")}
    assert everything == {*ALONE, *TOGETHER} | ELSEWHERE | RECIPES
    for script, lines in ALONE.items():
        printed = run(*ON_TWO_RANKS, str(EXAMPLES / script), folder=tmp_path)
        for expected in lines:
            assert expected in printed
    scripts = [str(EXAMPLES / script) for script in TOGETHER]
    printed = run(*ON_TWO_RANKS, str(ONE_AFTER_ANOTHER), *scripts, folder=tmp_path)
    parts = dict(part.split("\n", 1) for part in printed.split("[0] script ")[1:])
    for script, lines in TOGETHER.items():
        for expected in lines:
            assert expected in parts[script.removesuffix(".py")]


def test_models_are_averaged_in_six_ways(tmp_path: Path) -> None:
    options = ("--epochs", "2", "--out", "averaging.svg")
    printed = run(*ON_TWO_RANKS, str(EXAMPLES / "averaging.py"), *options, folder=tmp_path)
    rows = [line.removeprefix("[0] ").rsplit(maxsplit=2) for line in printed.splitlines()][1:]
    average = {name: float(together) for name, _, together in rows}
    assert list(average) == [
        "summed gradients",
        "every step",
        "every 8 steps",
        "every 64 steps",
        "once, one start",
        "once, other starts",
    ]
    assert average["every step"] > 0.6 > 0.3 > average["once, other starts"]
    assert (tmp_path / "averaging.svg").read_text().startswith("<svg")


def test_an_example_is_a_plain_script_too_and_one_starts_its_ranks(tmp_path: Path) -> None:
    assert "over 1 ranks" in run(str(EXAMPLES / "gradients_by_hand.py"), folder=tmp_path)
    lines = run(str(EXAMPLES / "setup_and_train.py"), "2", folder=tmp_path).splitlines()
    first, _, last = (float(line.rsplit(" ", 1)[1]) for line in lines)
    assert last < first


def write_idx(path: Path, values: np.ndarray) -> None:
    path.write_bytes(
        struct.pack(">HBB", 0, 8, values.ndim)
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.astype(np.uint8).tobytes()
    )


@pytest.fixture(scope="module")
def digits() -> Any:
    """scikit-learn sets environment variables as it is imported: before a test looks at them."""
    from sklearn.datasets import load_digits

    return load_digits()


def test_mnist_from_idx_files(digits: Any, tmp_path: Path) -> None:
    # 8x8 scans as 28x28
    images = np.kron(digits.images, np.ones((4, 4)))[:, 2:30, 2:30] * (255 / 16)
    for name, rows in (("train", slice(0, 640)), ("t10k", slice(640, 896))):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte", images[rows])
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte", digits.target[rows])
    task = str(EXAMPLES / "mnist_idx.py")
    options = ("--workers", "2", "--set", f"folder={tmp_path}", "--epochs", "3")
    printed = run("-m", "lockstep", "train", task, *options, folder=tmp_path)
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("mnist_idx: 3 epochs, 15 steps, 2 workers")
    assert float(last.split("accuracy ")[1].split()[0]) > 0.7
