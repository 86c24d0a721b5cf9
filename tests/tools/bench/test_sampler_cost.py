"""The sampler's figures: taken in fresh processes, torch's where it fits, and put beside each
other.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.tools.bench import sampler_cost
from lockstep.tools.bench.sampler_cost import Figure, SamplerRow, in_a_process, rows, table
from tests.refused import refused

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is measured on Linux only"
)

OURS = Figure(seconds=2e-4, mib=0.5, ns_per_index=12.34)
TORCHS = Figure(seconds=2.0, mib=100.0)


def test_ratios_are_torchs_over_ours() -> None:
    row = SamplerRow(samples=10**6, ours=OURS, torch=TORCHS)
    assert (row.time_ratio, row.memory_ratio) == (10_000, 200)
    # a page at least
    assert (
        SamplerRow(
            samples=1, ours=Figure(seconds=1, mib=0.0), torch=Figure(seconds=1, mib=1.0)
        ).memory_ratio
        == 256
    )
    alone = SamplerRow(samples=10**9, ours=OURS)
    assert (alone.time_ratio, alone.memory_ratio) == (None, None)


def test_json_has_every_figure_by_name() -> None:
    assert SamplerRow(samples=10**6, ours=OURS, torch=TORCHS).as_json() == {
        "samples": 10**6,
        "ours": {"seconds": 2e-4, "mib": 0.5, "ns_per_index": 12.34},
        "torch": {"seconds": 2.0, "mib": 100.0, "ns_per_index": None},
        "note": "",
        "time_ratio": 10_000,
        "memory_ratio": 200,
    }


def test_the_table_lines_up_and_says_what_was_not_measured() -> None:
    found = table(
        [
            SamplerRow(samples=10**6, ours=OURS, torch=TORCHS),
            SamplerRow(samples=10**12, ours=OURS, note="too large for this machine"),
        ]
    )
    head, first, second, note = found.splitlines()
    assert head.split("  ")[-2:] == ["time ratio", "memory ratio"]
    assert first.split() == ["1e06", "0.20", "0.50", "12.3", "2.000", "100.0", "10000", "200"]
    assert second.split() == ["1e12", "0.20", "0.50", "12.3", "-", "-", "-", "-"]
    assert note == "too large for this machine"
    assert len(head) == len(first) == len(second)


def test_torchs_is_measured_up_to_what_was_asked_and_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def figure(kind: sampler_cost.Kind, samples: int) -> Figure:
        asked.append((kind, samples))
        return OURS if kind == "ours" else TORCHS

    monkeypatch.setattr(sampler_cost, "in_a_process", figure)
    monkeypatch.setattr(sampler_cost, "from_proc", lambda file, name: 64 * 10**6)
    found = list(rows(10**7, (10**6, 10**7, 10**9)))
    assert asked == [("ours", 10**6), ("torch", 10**6), ("ours", 10**7), ("ours", 10**9)]
    assert [row.torch for row in found] == [TORCHS, None, None]
    assert [row.note for row in found] == [
        "",
        "torch's not measured at 10000000: it needs about 0.6 GiB, and 0.1 GiB are free",
        "",
    ]


def test_a_fresh_process_says_its_figure() -> None:
    found = in_a_process("ours", 5000)
    assert found.seconds > 0
    assert found.mib >= 0
    assert found.ns_per_index is not None
    assert found.ns_per_index > 0


def test_torchs_has_no_time_for_an_index() -> None:
    found = in_a_process("torch", 1000)
    assert found.seconds > 0
    assert found.ns_per_index is None


@pytest.mark.parametrize("samples", [1, 5, 10**12])
def test_any_number_of_samples_can_be_measured(samples: int) -> None:
    assert in_a_process("ours", samples).ns_per_index


def test_memory_that_is_taken_is_seen_and_the_past_forgotten() -> None:
    take_64_mib()
    peak = sampler_cost.Peak()
    assert peak.mib() < 32
    take_64_mib()
    assert peak.mib() > 48


def take_64_mib() -> None:
    """And give it back. Not by malloc: that may keep it, and hand the same pages out again."""
    with mmap.mmap(-1, 64 << 20) as pages:
        pages[::4096] = b"x" * len(pages[::4096])


@pytest.mark.parametrize(
    ("code", "said", "last"),
    [
        (1, "Traceback\nMemoryError: no room\n", "MemoryError: no room"),
        (-9, "", "it said nothing"),
    ],
)
def test_a_process_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str, last: str
) -> None:
    def failed(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command == [
            sys.executable,
            "-m",
            "lockstep.tools.bench.sampler_cost",
            "torch",
            "1000",
        ]
        return subprocess.CompletedProcess(command, code, "", said)

    monkeypatch.setattr(subprocess, "run", failed)
    values = {"kind": "torch", "samples": 1000, "exit_code": code, "said": last}
    with refused("sampler-measurement-failed", LockstepError, **values):
        in_a_process("torch", 1000)


def test_where_there_is_no_proc_it_is_said(tmp_path: Path) -> None:
    file, reason = str(tmp_path / "meminfo"), "No such file or directory"
    with refused("memory-not-measured", file=file, reason=reason):
        sampler_cost.from_proc(str(tmp_path / "meminfo"), "MemAvailable")


def test_a_figure_survives_json() -> None:
    assert Figure(
        **json.loads(json.dumps({"seconds": 1.0, "mib": 2.0, "ns_per_index": None}))
    ) == Figure(seconds=1.0, mib=2.0)
