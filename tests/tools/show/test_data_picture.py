"""The picture shows what the sampler does, and its verdicts can be no."""

from __future__ import annotations

from typing import Any

from lockstep.tools.show.data_picture import deal, text, verdicts


def show(samples: int, workers: int, **options: Any) -> str:
    return text(deal(samples, workers, **options))


DROPPED = """\
10 samples, 4 ranks, interleaved, drop last

  rank 0  [0 4]
  rank 1  [1 5]
  rank 2  [2 6]
  rank 3  [3 7]
  equal counts: yes, 2 a rank
  no overlap but the padding: yes, nothing is repeated
  union covers the data: no, 2 left out: [8 9]"""


def test_pictures() -> None:
    assert show(10, 4, drop_last=True) == DROPPED
    assert [line.split("[")[1] for line in show(10, 4, split="blocks").splitlines()[2:6]] == [
        *("0 1 2]", "3 4 5]", "6 7 8]", "9 0 1]")
    ]
    one = show(1, 4)
    assert one.startswith("1 sample, 4 ranks")
    assert "no overlap but the padding: yes, 3 extra, of [0]" in one


def test_epochs_are_shown_one_by_one_and_shuffled_anew() -> None:
    title, first, second = show(10, 2, epochs=2, shuffle=True, seed=3).split("\n\n")
    assert title == "10 samples, 2 ranks, interleaved, shuffled with seed 3"
    assert (first.splitlines()[0], second.splitlines()[0]) == ("epoch 0", "epoch 1")
    assert first.splitlines()[1:3] != second.splitlines()[1:3]
    assert first.splitlines()[3:] == second.splitlines()[3:]


def test_verdicts_on_three_samples() -> None:
    for parts, equal, overlap, union in (
        ([[0, 1], [2]], "no, 1 or 2 a rank", "yes, nothing is repeated", "yes"),
        ([[0, 1], [1, 2]], "yes, 2 a rank", "yes, 1 extra, of [1]", "yes"),
        ([[0], [0]], "yes, 1 a rank", "no, 1 extra, of [0]", "no, 2 left out: [1 2]"),
    ):
        assert verdicts(parts, 3) == [
            f"equal counts: {equal}",
            f"no overlap but the padding: {overlap}",
            f"union covers the data: {union}",
        ]
