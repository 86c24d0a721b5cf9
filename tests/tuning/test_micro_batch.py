"""Which sizes are tried, and what is made of those that fail; the measuring itself is in tests/cli/test_tune.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.settings import Settings
from lockstep.tuning import micro_batch
from lockstep.tuning.comparison import Comparison
from lockstep.tuning.micro_batch import Size, fastest, sizes, why


@pytest.mark.parametrize(
    ("global_batch", "own", "workers", "found"),
    [
        (64, 8, 2, [8, 16, 32, 4, 2]),
        (64, 8, 1, [8, 16, 32, 64, 4, 2]),
        (4096, 8, 1, [8, 16, 32, 64, 4, 2]),
        (64, 32, 2, [32, 16, 8]),
        (64, 64, 2, [64, 32, 16]),
        (96, 24, 2, [24, 48, 12, 6]),
        (11, 4, 2, [4, 1]),  # nothing but 1 and 11 divides it, and 11 would leave a rank without work
        (15, 6, 1, [6, 3]),
        (15, 7, 1, [7, 15, 5, 3]),
        (1, 1, 4, [1]),
    ],
)
def test_sizes_around_the_tasks_own(global_batch: int, own: int, workers: int, found: list[int]) -> None:
    assert sizes(global_batch, own, workers) == found


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 8))
def test_the_own_comes_first_and_the_others_divide_the_global_batch(global_batch: int, own: int, workers: int) -> None:
    found = sizes(max(global_batch, own), own, workers)
    assert found[0] == own
    assert len(set(found)) == len(found) <= 6
    assert all(max(global_batch, own) % size == 0 for size in found[1:])


def test_the_fastest_is_faster_by_more_than_noise() -> None:
    def size(micro: int, *times: float) -> Size:
        return Size(micro_batch=micro, samples_per_s=1.0, comparison=Comparison.of([1.0] * len(times), times) if times else None)

    own = size(8)
    assert fastest([own]) is None
    assert fastest([own, size(4, 1.2, 1.2, 1.2), size(16, 0.2, 0.9, 1.9)]) is None
    assert fastest([own, size(16, 0.9, 0.9, 0.9), size(32, 0.8, 0.8, 0.8), Size(micro_batch=64, note="out of memory")]) == size(
        32, 0.8, 0.8, 0.8
    )


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ("rank 1 (pid 3, host) failed: OutOfMemoryError: CUDA out of memory. Tried\n\nTraceback", "out of memory (rank 1"),
        ("rank 0 (pid 3, host) failed: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried", "out of memory (rank 0"),
        ("rank 0 (pid 3, host) was killed by signal 9 (SIGKILL); often the system's answer", "out of memory (rank 0"),
        ("rank 0 (pid 3, host) failed: ValueError: Expected more than 1 value\n\nTraceback", "rank 0 (pid 3, host) failed: ValueError"),
    ],
)
def test_why_a_size_failed(failure: str, said: str) -> None:
    assert why(failure).startswith(said)
    assert "\n" not in why(failure)


def test_what_would_not_fit_into_the_hosts_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(context: object, settings: Settings, size: int, own: int, seconds: float) -> Size:
        asked.append(size)
        return Size(micro_batch=size, samples_per_s=1.0, memory=size * 2**20)

    monkeypatch.setattr(micro_batch, "start_ranks", lambda *args, **options: [])
    monkeypatch.setattr(micro_batch, "_measure", measure)
    monkeypatch.setattr(micro_batch, "free_memory", lambda: 50 * 2**20)
    found = list(micro_batch.advise(Settings(task="x", workers=2, device="cpu"), 64, 8, 100.0))
    assert asked == [8, 16, 4, 2]  # 32 on two ranks may take 64 MiB
    assert found[2].note == "not tried: 2 ranks may need 0.1 GiB, and 0.0 GiB are free"
    asked.clear()
    list(micro_batch.advise(Settings(task="x", workers=2, device="cuda"), 64, 8, 100.0))
    assert asked == [8, 16, 32, 4, 2]  # a GPU's memory is not the host's


def test_after_the_own_has_failed_and_without_time_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "start_ranks", lambda *args, **options: [])
    monkeypatch.setattr(micro_batch, "_measure", lambda *args: Size(micro_batch=8, note="it broke"))
    settings = Settings(task="x", workers=2)
    assert [size.note for size in micro_batch.advise(settings, 64, 8, 100.0)] == ["it broke"]
    monkeypatch.setattr(micro_batch, "_measure", lambda *args: Size(micro_batch=8, samples_per_s=1.0))
    assert [size.note for size in micro_batch.advise(settings, 32, 8, 0.0)] == ["", *["not tried: no time left"] * 3]
