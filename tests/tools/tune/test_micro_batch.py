"""Which sizes are tried, and what is made of those that fail; the measuring itself is in
tests/cli/test_tune.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.settings import Settings
from lockstep.tools.tune import micro_batch
from lockstep.tools.tune.micro_batch import Size, fastest, sizes, why
from lockstep.tools.tune.search import PairedTimes
from lockstep.tools.tune.table import advice


@pytest.mark.parametrize(
    ("global_batch", "own", "workers", "found"),
    [
        (64, 8, 2, [8, 16, 32, 4, 2]),
        (64, 8, 1, [8, 16, 32, 64, 4, 2]),
        (4096, 8, 1, [8, 16, 32, 64, 4, 2]),
        (64, 32, 2, [32, 16, 8]),
        (64, 64, 2, [64, 32, 16]),
        (96, 24, 2, [24, 48, 12, 6]),
        # nothing but 1 and 11 divides it, and 11 would leave a rank without work
        (11, 4, 2, [4, 1]),
        (15, 6, 1, [6, 3]),
        (15, 7, 1, [7, 15, 5, 3]),
        (1, 1, 4, [1]),
    ],
)
def test_sizes_around_the_tasks_own(
    global_batch: int, own: int, workers: int, found: list[int]
) -> None:
    assert sizes(global_batch, own, workers) == found


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
def test_the_own_comes_first_and_the_others_divide_the_global_batch(
    global_batch: int, own: int, workers: int
) -> None:
    found = sizes(max(global_batch, own), own, workers)
    assert found[0] == own
    assert len(set(found)) == len(found) <= 6
    assert all(max(global_batch, own) % size == 0 for size in found[1:])


def test_the_fastest_is_faster_by_more_than_noise() -> None:
    def size(micro: int, *times: float) -> Size:
        return Size(
            micro_batch=micro,
            samples_per_s=1.0,
            comparison=PairedTimes.of([1.0] * len(times), times) if times else None,
        )

    own = size(8)
    assert fastest([own]) is None
    assert fastest([own, size(4, 1.2, 1.2, 1.2), size(16, 0.2, 0.9, 1.9)]) is None
    assert fastest(
        [
            own,
            size(16, 0.9, 0.9, 0.9),
            size(32, 0.8, 0.8, 0.8),
            Size(micro_batch=64, note="out of memory"),
        ]
    ) == size(32, 0.8, 0.8, 0.8)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            "rank 1 (pid 3, host) failed: OutOfMemoryError: CUDA out of memory. Tried\n\nTraceback",
            "out of memory (rank 1",
        ),
        (
            (
                "rank 0 (pid 3, host) failed: RuntimeError: DefaultCPUAllocator: can't allocate"
                " memory: you tried"
            ),
            "out of memory (rank 0",
        ),
        (
            "rank 0 (pid 3, host) was killed by signal 9 (SIGKILL); often the system's answer",
            "out of memory (rank 0",
        ),
        (
            "rank 0 (pid 3, host) failed: ValueError: Expected more than 1 value\n\nTraceback",
            "rank 0 (pid 3, host) failed: ValueError",
        ),
    ],
)
def test_why_a_size_failed(failure: str, said: str) -> None:
    assert why(failure).startswith(said)
    assert "\n" not in why(failure)


def test_what_would_not_fit_into_the_hosts_memory_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def measure(settings: Settings, size: int, own: int, seconds: float) -> Size:
        asked.append(size)
        return Size(micro_batch=size, samples_per_s=1.0, memory=size * 2**20)

    monkeypatch.setattr(micro_batch, "_measure", measure)
    monkeypatch.setattr(micro_batch, "free_memory", lambda: 50 * 2**20)
    found = list(micro_batch.advise(Settings(task="x", workers=2, device="cpu"), 64, 8, 100.0))
    assert asked == [8, 16, 4, 2]  # 32 on two ranks may take 64 MiB
    assert found[2].note == "not tried: 2 ranks may need 0.1 GiB, and 0.0 GiB are free"
    asked.clear()
    list(micro_batch.advise(Settings(task="x", workers=2, device="cuda"), 64, 8, 100.0))
    assert asked == [8, 16, 32, 4, 2]  # a GPU's memory is not the host's


def test_after_the_own_has_failed_and_without_time_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(micro_batch, "_measure", lambda *args: Size(micro_batch=8, note="it broke"))
    settings = Settings(task="x", workers=2)
    assert [size.note for size in micro_batch.advise(settings, 64, 8, 100.0)] == ["it broke"]
    monkeypatch.setattr(
        micro_batch, "_measure", lambda *args: Size(micro_batch=8, samples_per_s=1.0)
    )
    assert [size.note for size in micro_batch.advise(settings, 32, 8, 0.0)] == [
        "",
        *["not tried: no time left"] * 3,
    ]


TASK = """
import os, signal
from tests.training import toy

def loss(output, batch):
    if len(batch[1]) == 8:
        raise MemoryError("8 are too many")
    if len(batch[1]) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return toy.loss(output, batch)

def task():
    return toy.task(train_data=toy.data(48, 1), loss=loss, global_batch=24)
"""


def test_sizes_that_fail_say_how_and_the_others_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "my_task.py"
    file.write_text(TASK)
    settings = Settings(task=str(file), workers=2, device="cpu")
    own, eight, two, one = micro_batch.advise(settings, 24, 4, 60.0)
    assert (own.micro_batch, own.ran, own.samples_per_s > 0) == (4, True, True)
    assert (eight.micro_batch, two.micro_batch, one.micro_batch) == (8, 2, 1)
    assert one.note.startswith("rank ")
    assert "ValueError: Expected more than 1 value per channel" in one.note  # BatchNorm
    assert re.match(r"out of memory \(rank \d \(.*MemoryError: 8 are too many\)$", eight.note)
    assert re.match(r"out of memory \(rank \d \(.*was killed by signal 9", two.note)
    assert fastest([own, eight, two]) is None
    table = advice([own, eight, two], 4, 24)
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["2", "4", "8"]
    assert table.endswith(
        "no size is faster than the task's own 4 by more than noise; the largest that ran is 4, of"
        " a global batch of 24."
    )


def faster(micro: int) -> Size:
    return Size(
        micro_batch=micro,
        samples_per_s=50.0,
        memory=2**21,
        comparison=PairedTimes.of([1.0] * 3, [0.5] * 3),
    )


def test_what_is_faster_is_advised_with_what_it_changes() -> None:
    table = advice([Size(micro_batch=4, samples_per_s=25.0, memory=2**20), faster(8)], 4, 24)
    assert "micro_batch=8 is fastest; the largest that ran is 8" in table
    assert "another micro_batch changes the training" in table
    assert "return micro_batch=8" in table


def test_sizes_are_measured_beside_the_own_and_memory_on_fresh_ranks(tmp_path: Path) -> None:
    file = tmp_path / "my_task.py"
    file.write_text(
        "from tests.training import toy\n\ndef task():\n    return toy.task(global_batch=8)\n"
    )
    own, two, _ = micro_batch.advise(Settings(task=str(file), workers=2, device="cpu"), 8, 4, 60.0)
    assert own.comparison is None
    assert two.comparison is not None
    assert two.comparison.turns >= 3
    assert two.samples_per_s == pytest.approx(own.samples_per_s / two.comparison.ratio)
