"""Loss curves of really trained steps: the same bits, or said to be others."""

from __future__ import annotations

from lockstep.tools.show.loss_picture import Losses, drawing, text, title, trained


def test_exact_mode_gives_one_curve() -> None:
    found = trained("digits", (1, 2), 3, {}, exact=True)
    assert found.same
    assert len(found.losses[1]) == len(found.losses[2]) == 3
    assert found.losses[1][0] > found.losses[1][2] > 0
    assert title(found) == "digits, 3 steps with 1, 2 workers, exact mode: the same bits"


def test_a_difference_is_said() -> None:
    digests = {1: "a" * 64, 2: "a" * 64}
    losses = Losses("digits", False, {1: [2.0, 1.0], 2: [2.0, 1.0 + 2**-52]}, digests)
    assert not losses.same
    assert title(losses) == "digits, 2 steps with 1, 2 workers, not exact: other bits"
    last = text(losses).splitlines()[-2].split()
    assert last == ["2", "1", "1.0000000000000002"]
    assert not Losses("digits", True, {1: [2.0]}, {1: "a" * 64, 2: "b" * 64}).same
    assert drawing(losses).svg().count("<polyline") >= 2
