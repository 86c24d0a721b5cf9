"""Planted mistakes: each is found at its step and micro-batch, and called by its name. And tasks
without one agree.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lockstep.config.settings import Settings
from lockstep.tools.verify.judge import Verified, verify
from tests.tools.verify import amplifying, planted

SOURCE = Path(planted.__file__)
AMPLIFYING = Path(amplifying.__file__)


@pytest.fixture(autouse=True)
def one_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one training of each test had fresh interpreters, in which importing torch takes
    seconds (tests/cli/test_verify.py has that case).
    """
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def look(
    folder: Path,
    fault: str,
    *,
    exact: bool = True,
    counts: tuple[int, ...] = (1, 2),
    steps: int = 1,
    source: Path = SOURCE,
) -> Verified:
    file = folder / "my_task.py"
    shutil.copy(source, file)
    settings = Settings(
        task=str(file), overrides={"fault": fault}, steps=steps, device="cpu", exact=exact
    )
    return verify(settings, counts, say=lambda line: None)


def line(mark: str) -> str:
    """The line at which the file says WHERE `mark`, or the one below such a comment."""
    (number,) = [
        number + text.lstrip().startswith("#")
        for number, text in enumerate(SOURCE.read_text().splitlines(), 1)
        if f"# WHERE {mark}" in text
    ]
    return f"(my_task.py, line {number})"


@pytest.mark.parametrize("exact", [True, False])
def test_a_task_without_a_mistake(tmp_path: Path, exact: bool) -> None:
    found = look(tmp_path, "", exact=exact, counts=(1, 2, 3), steps=4)
    assert (found.difference, found.where, found.why) == (None, None, None)
    assert [(row.workers, row.steps, row.same) for row in found.rows] == [
        (1, 4, True),
        (2, 4, True),
        (3, 4, True),
    ]
    assert len({row.sha256 for row in found.rows}) == 1 or not exact


def test_what_the_keyed_streams_cover_is_no_mistake(tmp_path: Path) -> None:
    assert look(tmp_path, "random.random", steps=2).difference is None


SECOND_RANK = "(of rank 0 of 1 and of rank 1 of 2)"
FIRST_RANK = "(of rank 0 of 1 and of rank 0 of 2)"
RESULT = [  # the planted mistake, the micro-batch of step 1, who ran it, what the cause says
    (
        "own generator",
        2,
        SECOND_RANK,
        ["randomness outside the keyed streams", "random.Random.random()", line("own generator")],
    ),
    (
        "own torch generator",
        2,
        SECOND_RANK,
        ["randomness outside the keyed streams", "a torch.Generator of the task's own"],
    ),
    (
        "dropout by rank",
        2,
        SECOND_RANK,
        [
            "seeded by the rank",
            "torch.manual_seed()",
            "torch.distributed.get_rank()",
            line("dropout"),
        ],
    ),
    (
        "clock",
        0,
        FIRST_RANK,
        ["time-based seed", f"time.time() {line('clock')}", "torch.manual_seed()"],
    ),
    (
        "clock when loaded",
        0,
        FIRST_RANK,
        ["time-based seed", "loading the task twice", f"time.time_ns() {line('loaded_at')}"],
    ),
    ("world size", 0, FIRST_RANK, ["depends on the number of workers", line("world size")]),
    ("counter", 2, SECOND_RANK, ["kept from one call to the next", "a counter"]),
]


@pytest.mark.parametrize(
    ("fault", "slot", "ranks", "words"), RESULT, ids=[row[0] for row in RESULT]
)
def test_a_result_that_depends_on_how_it_is_run(
    tmp_path: Path, fault: str, slot: int, ranks: str, words: list[str]
) -> None:
    found = look(tmp_path, fault)
    assert found.difference is not None
    assert found.where is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step, found.difference.slot) == (
        "loss",
        1,
        slot,
    )
    assert found.difference.name == "last.bias"
    assert found.where.startswith(
        f"step 1, micro-batch {slot} {ranks}: from the same samples and weights its loss is "
    )
    assert found.where.endswith("the first gradient that differs is that of last.bias")
    assert [word for word in words if word not in found.why] == []
    assert [row.same for row in found.rows] == [True, False]


def test_a_result_that_depends_on_the_threads(tmp_path: Path) -> None:
    """Exact mode fixes their number; else the ranks of a host share its cores."""
    found = look(tmp_path, "threads", exact=False)
    assert found.difference is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step, found.difference.slot) == ("loss", 1, 0)
    assert "depends on the number of intra-op threads" in found.why
    assert f"torch.get_num_threads() {line('threads')}. With --exact" in found.why
    assert look(tmp_path, "threads").difference is None


def test_a_gradient_that_differs_though_the_loss_does_not(tmp_path: Path) -> None:
    found = look(tmp_path, "nondeterministic backward")
    assert found.difference is not None
    assert found.where is not None
    assert found.why is not None
    assert (
        found.difference.kind,
        found.difference.step,
        found.difference.slot,
        found.difference.name,
    ) == ("gradient", 1, 2, "last.bias")
    assert "its loss is the same, but the gradient of last.bias differs (norms " in found.where
    assert "draws from random.Random.random()" in found.why


SAMPLES = [
    (
        "rank in the samples",
        ["the dataset depends on the rank", f'os.environ["RANK"] {line("rank in the samples")}'],
    ),
    (
        "rank in the data set's constructor",
        ["the dataset depends on the rank", f'os.environ["RANK"] {line("constructor")}'],
    ),
    (
        "samples of an own generator",
        [
            "randomness outside the keyed streams",
            f"numpy.random.default_rng() {line('default_rng')}",
        ],
    ),
]


@pytest.mark.parametrize(("fault", "words"), SAMPLES, ids=[row[0] for row in SAMPLES])
def test_samples_that_depend_on_how_they_are_read(
    tmp_path: Path, fault: str, words: list[str]
) -> None:
    found = look(tmp_path, fault)
    assert found.difference is not None
    assert found.where is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step) == ("samples", 1)
    assert found.difference.slot == (0 if "own" in fault else 2)
    assert (
        f"its samples ({', '.join(map(str, found.difference.indices or ()))}) are not the same on 1"
        " worker and on 2 workers" in found.where
    )
    assert [word for word in words if word not in found.why] == []


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (
            "sample edited",
            "a sample is edited in place: reading these samples twice in one process",
        ),
        (
            "batch edited",
            "a sample is edited in place: it changes after the model and the loss have used it",
        ),
    ],
)
def test_a_sample_edited_in_place_is_seen_in_the_first_epoch(
    tmp_path: Path, fault: str, cause: str
) -> None:
    """The trainings agree until a rank reads a sample again that another one had read first: in
    the second epoch.
    """
    found = look(tmp_path, fault)
    assert found.difference is not None
    assert found.where is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step, found.difference.slot) == ("again", 1, 0)
    assert "change when they are read again after the training" in found.where
    assert found.why.startswith(cause)
    assert all(row.same for row in found.rows)


@pytest.mark.parametrize(("fault", "alike"), [("all samples seeded alike", True), ("noise", False)])
def test_samples_that_get_the_same_noise_are_a_mistake_though_the_trainings_agree(
    tmp_path: Path, fault: str, alike: bool
) -> None:
    found = look(tmp_path, fault)
    assert found.difference is None
    assert (found.equal_noise is not None) == alike
    assert found.correct != alike
    if found.equal_noise is not None:
        one, other = found.equal_noise
        assert one != other
        assert found.as_json()["samples_with_equal_noise"] == [one, other]


def test_a_sample_edited_in_place_in_the_second_epoch(tmp_path: Path) -> None:
    found = look(tmp_path, "sample edited", steps=planted.SAMPLES // 8 + 1)
    assert found.difference is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step, found.difference.epoch) == (
        "samples",
        4,
        1,
    )
    assert found.why.startswith("a sample is edited in place")


def test_weights_that_differ_before_the_first_step(tmp_path: Path) -> None:
    found = look(tmp_path, "start")
    assert found.difference is not None
    assert found.why is not None
    assert found.where == "before the first step last.bias differs between 1 worker and 2 workers"
    assert (
        "building the model twice in one process, from the same random streams, gives two results,"
        f" and it reads the clock: time.time_ns() {line('start')}" in found.why
    )


def test_rounding_that_the_optimizer_amplifies_is_no_alarm(tmp_path: Path) -> None:
    found = look(tmp_path, "", exact=False, counts=(1, 2, 3), steps=5, source=AMPLIFYING)
    assert (found.difference, found.where, found.why) == (None, None, None)
    assert [row.same for row in found.rows] == [True, True, True]
    assert len({row.sha256 for row in found.rows}) == 3
    assert [each.workers for each in found.amplified] == [(1, 2), (1, 3)]
    assert found.as_json()["same"] is True
    assert [each["name"] for each in found.as_json()["amplified_rounding"]] == [
        each.name for each in found.amplified
    ]


def test_a_cause_beside_amplified_rounding_is_found(tmp_path: Path) -> None:
    """In size it is like rounding: values alone would not tell. Trained with exact, it shows
    where it begins.
    """
    found = look(tmp_path, "loss by rank", exact=False, steps=5, source=AMPLIFYING)
    assert found.difference is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step, found.difference.slot) == ("loss", 1, 4)
    assert (
        "the result depends on the rank: when this process acts as another rank, it gets another one:"
        ' os.environ["RANK"]' in found.why
    )
    assert found.amplified == ()
    assert [row.same for row in found.rows] == [True, False]


def test_an_optimizer_that_asks_for_the_number_of_workers(tmp_path: Path) -> None:
    found = look(tmp_path, "optimizer by size", exact=False, source=AMPLIFYING)
    assert found.difference is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step, found.difference.name) == (
        "weights",
        1,
        "0.weight",
    )
    assert found.why.startswith("the optimizer, or a buffer")


def test_randomness_seeded_by_the_rank_is_found_without_exact_too(tmp_path: Path) -> None:
    found = look(tmp_path, "dropout by rank", exact=False)
    assert found.difference is not None
    assert found.why is not None
    assert (found.difference.kind, found.difference.step, found.difference.slot) == ("loss", 1, 2)
    assert "seeded by the rank" in found.why
