"""Grader 7: against Lockstep's timing of a ring's messages, and other forms of the formulas."""

from __future__ import annotations

from types import ModuleType

from grading import check, close

from lockstep.schedules.algorithms.ring_tree_halving import ring
from lockstep.schedules.network import Network


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


def check_scaling(lesson: ModuleType) -> None:
    for rates, expected in [
        ({1: 100.0, 2: 190.0, 4: 357.0}, {1: (1, 1), 2: (1.9, 0.95), 4: (3.57, 0.8925)}),
        ({16: 300.0, 8: 200.0}, {8: (1, 1), 16: (1.5, 0.75)}),
    ]:
        found = lesson.scaling(rates)
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
