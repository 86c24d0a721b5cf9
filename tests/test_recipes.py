"""The examples that docs/how-to links (ema, gan, lora, packing, small-memory): each ends with the
same bits on one, two and three ranks.
"""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep import World
from lockstep.testing import run_ranks, warm_commands
from lockstep.training.resolve import resolve

pytestmark = pytest.mark.rest

EXAMPLES = Path(__file__).parents[1] / "examples"
GIVEN: dict[str, tuple[str, dict[str, str], int]] = {
    "ema": ("weight_average", {}, 20),
    "swa": ("weight_average", {"average": "swa", "swa_after": "1"}, 48),
    "checkpointing": ("gradient_checkpointing", {"depth": "3"}, 10),
    "kept activations": ("gradient_checkpointing", {"depth": "3", "checkpointing": "false"}, 10),
    "packing": ("packing", {}, 16),
    "packing by length": ("packing", {"order": "length"}, 16),
    "lora": ("lora", {}, 4),
}
"""By name: the file, its --set, and the steps of a test."""
Ended = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Ranks would each import these for seconds."""
    with warm_commands(("peft", "transformers.models.gpt2.modeling_gpt2")):
        yield


def everything(world: World, folder: Path) -> Ended:
    """What each example ends with: SHA-256 of the weights and of their average, and metrics."""
    warnings.filterwarnings("ignore", module="transformers|peft")
    sent: list[int] = []
    ended: Ended = {}
    for name, (file, given, steps) in GIVEN.items():
        task = resolve(str(EXAMPLES / f"{file}.py"), given)
        task = replace(task, on_step=lambda record: sent.append(record["bytes_sent"]))
        # shared memory sends nothing that could be counted
        options = {"run": folder / name, "reduce": "native"} if name == "lora" else {}
        found = lockstep.train(task, steps=steps, exact=True, world=world, **options)
        ended[name] = found.sha256, found.average_sha256, found.metrics
    if world.rank == 0:
        ended["adapters"] = adapters(found.model, folder / "lora", folder / "exported")
        ended["bytes a step"] = sent[-1]
    ended["gan"] = runpy.run_path(str(EXAMPLES / "gan.py"))["train"](epochs=1)
    return ended


def adapters(trained: nn.Module, run: Path, out: Path) -> dict[str, Any]:
    """Of the lora example: what was trained, and whether its export is the trained model."""
    from peft import PeftModel

    example = runpy.run_path(str(EXAMPLES / "lora.py"))
    example["export"](run, out)
    loaded: Any = PeftModel.from_pretrained(example["base"](), out)
    (batch,) = example["data"](4, seed=2).tensors
    before = {
        name.replace(".base_layer", ""): each for name, each in example["base"]().named_parameters()
    }
    bare = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): each
        for name, each in trained.named_parameters()
    }
    with torch.no_grad():
        same = torch.equal(loaded.eval()(batch).logits, trained.eval()(batch).logits)
    return {
        "frozen": all(torch.equal(bare[name], each) for name, each in before.items()),
        "bytes": sum(each.nbytes for each in trained.parameters() if each.requires_grad),
        "base": sum(each.nbytes for each in before.values()),
        "exported": same,
    }


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Ended]]:
    """By world size, of each rank."""
    return {
        size: run_ranks(everything, size, [tmp_path_factory.mktemp(f"of-{size}")])
        for size in (1, 2, 3)
    }


@pytest.mark.parametrize("name", [*GIVEN, "gan"])
def test_an_example_ends_with_the_same_bits(name: str, ended: dict[int, list[Ended]]) -> None:
    ((expected),) = [rank[name] for rank in ended[1]]
    assert [rank[name] for size in (2, 3) for rank in ended[size]] == [expected] * 5


def test_recomputed_activations_change_no_bit(ended: dict[int, list[Ended]]) -> None:
    assert ended[1][0]["checkpointing"] == ended[1][0]["kept activations"]


def test_an_average_is_no_copy_of_the_weights(ended: dict[int, list[Ended]]) -> None:
    for name in ("ema", "swa"):
        weights, average, _ = ended[1][0][name]
        assert average not in (weights, None)


def test_only_adapters_are_trained_travel_and_are_exported(ended: dict[int, list[Ended]]) -> None:
    for size in (1, 2, 3):
        found = ended[size][0]["adapters"]
        assert found["frozen"]
        assert found["exported"]
    # a rank of two sends half of its gradients, then its half of the sums
    assert found["bytes"] <= ended[2][0]["bytes a step"] < found["bytes"] + 4096 < found["base"]


def test_packed_sequences_have_the_losses_that_they_have_alone() -> None:
    example = runpy.run_path(str(EXAMPLES / "packing.py"))
    torch.manual_seed(0)
    model = example["Model"]()
    samples = list(example["sequences"](9, seed=3))

    def losses(packed: list[tuple[Tensor]]) -> tuple[float, float]:
        batch = example["packed"](packed)
        total, weight = example["loss"](model(*batch), batch)
        return total.item(), weight.item()

    alone = [losses([each]) for each in samples]
    total, weight = losses(samples)
    assert example["packed"](samples).shape[1] < len(samples)
    assert weight == sum(count for _, count in alone) == sum(len(each) - 1 for (each,) in samples)
    assert total == pytest.approx(sum(nats for nats, _ in alone), rel=1e-5)
