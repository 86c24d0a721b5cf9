"""Grader 7: against Lockstep's timing of a ring's messages, and other forms of the formulas. The
scaling is measured on ranks whose clock runs by the steps, so that the rate is known.
"""

from __future__ import annotations

import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock
from xml.etree import ElementTree

import torch.distributed as dist
from grading import PATIENCE, Wrong, check, close, failures_as_wrong

import lockstep
from lockstep.schedules.algorithms.ring_tree_halving import ring
from lockstep.schedules.network import Network

WARM_UP, STEPS = 3, 5
FIRST = 100.0  # seconds of a step of the warm-up, on the ranks' clock


def grade(lesson: ModuleType) -> None:
    check_scaling(lesson)
    for ranks, size, latency, bandwidth in [
        (8, 3e5, 25e-6, 3e9),
        (8, 1.3e9, 0, 450e9),
        (2, 1e6, 0, 1e9),
        (3, 7e5, 1e-4, 1e8),
    ]:
        expected = Network.flat(latency, bandwidth).time(ring(ranks), size)
        found = lesson.ring_seconds(ranks, size, latency, bandwidth)
        rounds, seconds = 2 * (ranks - 1), size / bandwidth
        both = (
            "You counted 4(N - 1) messages: what a rank sends and what it receives. It does both at "
            "once, so only the 2(N - 1) rounds take time."
        )
        hints = [
            (2 * expected, both),
            (2 * rounds * latency + seconds, both),
            (expected / 2, "You counted N - 1 rounds. The sums must be passed on too: 2(N - 1)."),
            (
                rounds * (latency + seconds),
                "Each of the 2(N - 1) messages has one cell, 1/N of the tensor, and not all of it.",
            ),
            (
                rounds * latency + seconds,
                "A rank sends 2(N - 1)/N times the tensor, and not the tensor once.",
            ),
            (rounds / ranks * seconds, "You left the latency out. Each round has it."),
            (
                latency + rounds / ranks * seconds,
                "You counted the latency once. Each round has it.",
            ),
        ]
        hint = next((sentence for wrong, sentence in hints if close(found / wrong, 1.0)), "")
        check(
            close(found / expected, 1.0),
            f"ring_seconds({ranks}, {size:g}, {latency:g}, {bandwidth:g}) returned {found:.6g}. The "
            f"messages of a ring take {expected:.6g} seconds. {hint}",
        )
    found = lesson.ring_seconds(1, 1e6, 1e-3, 1e9)
    check(found == 0, f"One rank sends nothing, and ring_seconds says {found}.")
    check_step(lesson)
    check_measure(lesson)
    check_drawing(lesson, {1: 100.0, 2: 190.0, 4: 300.0})
    check_drawing(lesson, {8: 300.0, 2: 100.0})


def check_scaling(lesson: ModuleType) -> None:
    for rates, expected in [
        ({1: 100.0, 2: 190.0, 4: 357.0}, {1: (1, 1), 2: (1.9, 0.95), 4: (3.57, 0.8925)}),
        ({16: 300.0, 8: 200.0}, {8: (1, 1), 16: (1.5, 0.75)}),
    ]:
        try:
            found = lesson.scaling(rates)
        except KeyError as error:
            raise Wrong(
                f"scaling({rates}) looked up {error} workers. Nobody measured that number: the base is "
                "the smallest one that was measured."
            ) from None
        check(
            isinstance(found, dict) and found.keys() == expected.keys(),
            f"scaling({rates}) must return a dict with the keys {sorted(expected)}.",
        )
        for workers, values in expected.items():
            check(
                close(found[workers], values),
                f"scaling({rates}): {workers} workers have (speedup, efficiency) = {values}, and "
                f"you returned {found[workers]}.",
            )


def check_step(lesson: ModuleType) -> None:
    for forward, backward, buckets in [
        (1.0, 2.0, [0.5]),
        (1.0, 2.0, [0.1, 0.1, 0.1, 0.1]),
        (1.0, 2.0, [3.0, 0.1]),
        (0.0, 1.0, [0.1, 0.9, 0.1, 0.05]),
    ]:
        count = len(buckets)
        # the last moment at which the link began to work without a pause is what counts
        expected = max(
            forward + backward * (first + 1) / count + sum(buckets[first:])
            for first in range(count)
        )
        found = lesson.step_seconds(forward, backward, buckets)
        check(
            close(found, expected) or not close(found, forward + backward + sum(buckets)),
            f"step_seconds({forward}, {backward}, {buckets}) is {expected:g}, and you returned "
            f"{found:g}: the sum of all parts, without overlap. A bucket travels while the backward "
            "pass computes the next ones.",
        )
        check(
            close(found, expected),
            f"step_seconds({forward}, {backward}, {buckets}) is {expected:g}, and you returned "
            f"{found:g}.",
        )
    found = lesson.step_seconds(1.0, 2.0, [])
    check(close(found, 3.0), f"Without buckets a step takes 3.0 seconds, and you returned {found}.")


HELD = (
    "You leave the group, and a variable still holds the step with its DDP model. A model that is freed "
    "after its group can hang (lesson 5). Measure in a function of its own, or del the step first."
)


def build() -> Callable[[], int]:
    """A step of which the seconds are known: many in the warm-up, then as many as the rank's number
    and one.
    """
    rank, steps = dist.get_rank(), 0
    now = 0.0
    time.perf_counter = lambda: now

    def step() -> int:
        nonlocal steps, now
        steps += 1
        now += rank + 1 if steps > WARM_UP else FIRST
        return 8 + rank

    held, leave_group = weakref.ref(step), dist.destroy_process_group

    def leave() -> None:
        in_an_exception = sys.exc_info()[0] is not None  # its frames hold the step
        if held() is not None and not in_an_exception:
            raise Wrong(HELD)
        leave_group()

    dist.destroy_process_group = leave
    return step


def check_measure(lesson: ModuleType) -> None:
    for numbers in ([1, 2, 4], [3]):
        patient = partial(lockstep.launch, timeout=PATIENCE)
        with failures_as_wrong(), mock.patch.object(lockstep, "launch", patient):
            rates = lesson.measure(build, numbers, WARM_UP, STEPS)
        check(
            isinstance(rates, dict) and [*rates] == numbers,
            f"measure(build, {numbers}) must return a dict with these keys.",
        )
        for workers in numbers:
            check_rate(workers, rates[workers])


def check_rate(workers: int, rate: float) -> None:
    samples = sum(8 + rank for rank in range(workers))
    hints = {
        samples: "That is the time of rank 0. The slowest rank counts: all others wait for it.",
        2
        * samples
        / (workers + 1): "You took a mean of the ranks' times. The slowest rank counts.",
        8 / workers: "Those are the samples of rank 0 alone. Add up those of all ranks.",
        8.0: "Those are the samples and the time of rank 0 alone.",
        1 / workers: "That is steps per second, and not samples per second.",
    }
    hint = next((sentence for wrong, sentence in hints.items() if close(rate, wrong)), "")
    if rate < samples / workers / 5:
        hint = "The warm-up is in your time: its steps are slow."
    if rate > 10 * samples:
        hint = "Did you call time.perf_counter() before and after the measured steps?"
    check(
        close(rate, samples / workers),
        f"With workers={workers} a step of all ranks had {samples} samples and took the slowest rank "
        f"{workers} s. measure() says {rate:.6g} samples per second, not {samples / workers:.6g}. {hint}",
    )


def check_drawing(lesson: ModuleType, rates: Mapping[int, float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scaling.svg"
        lesson.draw(rates, str(file))
        check(file.exists(), "draw() did not write the file.")
        try:
            root = ElementTree.parse(file).getroot()
        except ElementTree.ParseError as error:
            raise Wrong(f"What draw() wrote is no SVG: {error}") from None
    marks: dict[str, list[ElementTree.Element]] = {"circle": [], "line": [], "text": []}
    for mark in root.iter():
        marks.setdefault(mark.tag.rpartition("}")[2], []).append(mark)
    count = len(marks["circle"])
    check(
        count == len(rates),
        f"There are {len(rates)} measurements, {dict(rates)}, and draw() drew {count} circles.",
    )
    base, most = min(rates), max(rates)
    across = sorted(_number(circle, "cx") for circle in marks["circle"])
    scale = (across[-1] - across[0]) / (most - base)
    heights = {_number(circle, "cx"): _number(circle, "cy") for circle in marks["circle"]}
    rise = (heights[across[0]] - heights[across[-1]]) / (rates[most] / rates[base] - 1)
    texts = [text.text or "" for text in marks["text"]]
    for workers, x in zip(sorted(rates), across, strict=True):
        speedup = rates[workers] / rates[base]
        check(
            close(x, across[0] + scale * (workers - base), 0.01),
            f"The circle of {workers} workers must be at {workers} on a linear axis of workers.",
        )
        check(
            rise > 0 and close(heights[x], heights[across[0]] - rise * (speedup - 1), 0.01),
            f"The circle of {workers} workers must be at the height of its speedup, {speedup:.2f}.",
        )
        percent = f"{speedup * base / workers:.0%}"
        check(
            any(percent in text for text in texts),
            f"{workers} workers have efficiency {percent}. No text of the drawing says so.",
        )
    ideal = heights[across[0]] - rise * (most / base - 1)
    check(
        any(
            close(_number(line, "x2"), across[-1], 0.01) and close(_number(line, "y2"), ideal, 0.01)
            for line in marks["line"]
        ),
        f"No line shows linear scaling: it must end at {most} workers and speedup {most / base:g}.",
    )


def _number(mark: ElementTree.Element, name: str) -> float:
    return float(mark.get(name, "nan"))
