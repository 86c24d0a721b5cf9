"""Ratios worked out by hand from given times; and the public function on small models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.collectives.network import Link
from lockstep.errors import UsageError
from lockstep.tools.bench.ratio import CommunicationRatio, ratio_of, sum_of
from lockstep.tools.plan.methods import method_of, work_of_module
from tests.refused import refused

FLOPS = 3 * 10**9
MODEL = nn.Linear(999, 1000)  # 4 MB of gradients
SLOW = Link(0.0, 1e6)


def found(
    world_size: int = 4,
    network: Link | str = SLOW,
    method: str = "native",
    seconds: float = 3.0,
    model: nn.Module = MODEL,
    flops: int = FLOPS,
    landed: Sequence[float] = (),
) -> CommunicationRatio:
    """A third of the seconds is forward."""
    work, chosen = work_of_module(model, seconds=seconds, landed=landed), method_of(method)
    return ratio_of(
        type(model).__name__,
        work,
        flops,
        samples=10,
        world_size=world_size,
        network=network,
        method=chosen,
        told=method,
    )


def test_the_sizes_and_the_ratio() -> None:
    ratio = found()
    assert ratio.gradient_bytes == 4_000_000
    assert ratio.bytes_sent == 6_000_000  # 2 (W - 1) / W
    assert ratio.communication == pytest.approx(6.0)
    assert ratio.ratio == pytest.approx(6.0 / 3.0)
    assert ratio.device_rate == 1e9
    assert ratio.significant


def test_accumulation_divides_bytes_by_sample_and_not_by_step() -> None:
    rows = found().rows
    assert [row.micro_batches for row in rows] == [1, 2, 4, 8]
    assert {row.bytes_per_step for row in rows} == {6_000_000}
    assert [row.bytes_per_sample for row in rows] == [600_000, 300_000, 150_000, 75_000]
    assert [row.ratio for row in rows] == pytest.approx([2.0, 1.0, 0.5, 0.25])
    assert [row.step - 3.0 * row.micro_batches for row in rows] == pytest.approx(
        [row.exposed for row in rows]
    )


def test_what_travels_behind_the_backward_is_not_exposed() -> None:
    model = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(4)))
    quick = found(network=Link(0.0, 1e9), model=model)
    work = work_of_module(model)
    last = work.buckets[-1].elements / work.elements
    assert quick.communication == pytest.approx(1.5 * quick.gradient_bytes / 1e9)
    assert 0 < last < 1
    # the others are over long before it
    assert quick.exposed == pytest.approx(last * quick.communication)
    assert quick.hidden + quick.exposed == pytest.approx(quick.communication)


def test_a_large_layer_that_lands_early_is_hidden() -> None:
    # the last one fills buckets
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 700_000))
    early, late = (
        found(model=model, network=Link(0.0, 1e8), landed=(1.0,) * 4 + (share,) * 2)
        for share in (0.01, 0.99)
    )
    assert (
        early.communication == late.communication == pytest.approx(1.5 * early.gradient_bytes / 1e8)
    )
    assert early.exposed < 0.01 * early.communication
    # a hundredth of the backward is left to hide behind
    assert late.exposed == pytest.approx(late.communication - 0.02)


def test_latency_counts_for_every_message() -> None:
    assert found(network=Link(0.5, 1e12)).communication == pytest.approx(2 * 3 * 0.5, rel=1e-4)


def test_a_free_network_and_a_rank_alone() -> None:
    free, alone = found(network="free"), found(world_size=1)
    assert (free.communication, free.significant, free.bytes_sent) == (0.0, False, 6_000_000)
    assert (alone.communication, alone.significant, alone.bytes_sent) == (0.0, False, 0.0)
    assert free.advice == ("communication is free: there is nothing to do",)
    assert "one rank sends nothing" in alone.advice[0]


def test_compression_and_narrow_parameters_send_less() -> None:
    assert found(method="--compress bf16").bytes_sent == 3_000_000
    half = found(model=nn.Linear(999, 1000).to(torch.bfloat16))
    assert (half.gradient_bytes, half.bytes_sent) == (2_000_000, 3_000_000)
    assert half.communication == pytest.approx(3.0)


def test_a_step_of_several_micro_batches() -> None:
    work = work_of_module(MODEL, seconds=12.0, micro_batches=4)
    four = ratio_of(
        "M", work, FLOPS, samples=10, world_size=4, network=SLOW, method=method_of("native")
    )
    assert (four.computation, four.communication, four.ratio) == pytest.approx((12.0, 6.0, 0.5))
    assert [row.ratio for row in four.rows] == pytest.approx([2.0, 1.0, 0.5, 0.25])
    assert four.advice[1].startswith("accumulate 32 micro-batches of 10: 0.062")
    assert (
        "computation 12 s for 4 micro-batches of 10 samples (forward 1 s, backward 2 s each); 12"
        " GFLOP" in four.describe()
    )


def test_local_steps_send_an_hth() -> None:
    assert found(method="--sync-every 50").bytes_sent == pytest.approx(6_000_000 / 50)


def test_the_limit_is_a_tenth() -> None:
    assert found(seconds=60.0).ratio == pytest.approx(0.1)
    assert not found(seconds=60.1).significant
    assert found(seconds=59.9).significant


def test_every_advice_reaches_the_limit_or_says_what_it_reaches() -> None:
    batch, accumulate, bf16, int8, powersgd, local = found().advice
    assert batch.startswith("micro-batches of 200 samples in place of 10")
    assert batch.endswith("about 0.1")
    assert accumulate.startswith("accumulate 32 micro-batches of 10: 0.062")
    assert bf16.startswith("--compress bf16: 1,")
    assert int8.startswith("--compress int8: 0.53")
    assert powersgd.startswith("--compress powersgd:4: 0.0")
    assert local.startswith("--sync-every 20: 0.1;")


def test_a_link_so_much_slower_would_be_significant() -> None:
    ratio = found(network=Link(0.0, 1e9))
    assert ratio.advice[0].endswith("on a link 50 times slower)")
    assert found(network=Link(0.0, 1e9 / 49)).significant is False
    assert found(network=Link(0.0, 1e9 / 51)).significant


def test_text_and_json_say_the_same() -> None:
    ratio = found()
    text = ratio.describe()
    assert (
        "Linear: 1000000 parameters, 4 MB of gradients; each of 4 ranks sends 6 MB a step\n" in text
    )
    assert (
        "computation 3 s for 10 samples (forward 1 s, backward 2 s); 3 GFLOP in matrix products"
        in text
    )
    assert "communication / computation = 2: significant" in text
    told = json.loads(json.dumps(ratio.as_json()))
    assert (told["ratio"], told["significant"], told["rows"][3]["bytes_per_sample"]) == (
        2.0,
        True,
        75_000,
    )
    assert json.loads(json.dumps(found(network="free").as_json()))["link_rate"] == "inf"
    assert "no FLOPs counted" in found(flops=0).describe()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x: Tensor, more: Tensor) -> dict[str, Any]:
        return {"output": self.layer(x) + more, "index": torch.arange(3), "note": "text"}


def test_a_batch_is_what_the_model_is_called_with() -> None:
    x, more = torch.randn(7, 6), torch.randn(7, 2)
    for batch in ((x, more), [x, more], {"x": x, "more": more}):
        ratio = lockstep.communication_ratio(Both(), batch, 2, network="1Gbit")
        assert (ratio.samples, ratio.flops, ratio.bytes_sent) == (7, 2 * 2 * 7 * 6 * 2, 56)
    single = lockstep.communication_ratio(
        nn.Linear(6, 2), x, 2, loss=lambda output: output.square().mean()
    )
    assert single.flops == 2 * 2 * 7 * 6 * 2


@pytest.mark.parametrize(
    ("batch", "options", "said"),
    [
        ([], {}, r"a list .*\[batch-without-tensor\]"),
        (torch.ones(0, 6), {}, r"a Tensor .*\[batch-without-tensor\]"),
        (torch.ones(3, 6), {"world_size": 0}, r"world_size=0.*\[not-a-whole-number\]"),
        (torch.ones(3, 6), {"network": "7"}, "network='7' is unknown"),
        (torch.ones(3, 6), {"network": 7}, r"network=7.*\[wrong-type\]"),
        (torch.ones(3, 6), {"method": "--nope 3"}, "method '--nope 3'"),
    ],
)
def test_questions_that_cannot_be_answered(batch: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        lockstep.communication_ratio(nn.Linear(6, 2), batch, **{"world_size": 2, **options})


def test_a_model_without_gradients_or_without_numbers() -> None:
    with pytest.raises(UsageError, match="ReLU has no parameter that is trained"):
        lockstep.communication_ratio(nn.ReLU(), torch.ones(3, 6), 2)
    with refused("output-without-tensor", kind="str"):
        sum_of("text")
