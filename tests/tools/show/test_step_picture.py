"""The picture of a data-parallel step is of the batch plan that a training cuts its steps by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.show import planned_step
from lockstep.tools.show.step_picture import drawing, text
from tests.refused import refused

TWO_RANKS = """\
one step of 2 ranks: global batch 32 = 2 micro-batches x 16; 2 ranks x 1

rank 0   samples 0-15    micro-batch 0
rank 1   samples 16-31   micro-batch 1

forward      each rank: the losses of its own samples
backward     each rank: the gradients of its own samples
all-reduce   all ranks together: add the gradients, divide by 32 samples
update       each rank: the same optimizer step, so the weights stay equal"""


def test_two_ranks() -> None:
    assert text(planned_step(2, 32, None)) == TWO_RANKS


def test_ranks_with_more_with_fewer_and_with_nothing() -> None:
    lines = text(planned_step(4, 9, 4)).splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines[2:6]] == [
        "samples 0-3   micro-batch 0",
        "samples 4-7   micro-batch 1",
        "sample 8      micro-batch 2",
        "no samples    micro-batch none",
    ]


@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 60))
def test_every_sample_is_on_one_rank(workers: int, batch: int, micro_batch: int) -> None:
    step = planned_step(workers, batch, min(micro_batch, batch))
    held = [sample for rank in range(workers) for sample in step.samples[rank]]
    assert held == list(range(batch))


def test_what_cannot_be_drawn() -> None:
    for workers, batch in ((0, 8), (2, 0)):
        with refused("wrong-value", value=0):
            planned_step(workers, batch, None)
    with refused("drawing-too-large", what="9 ranks", most=8):
        drawing(planned_step(9, 32, None))
