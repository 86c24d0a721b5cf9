"""Planted mistakes: each is found at its step and micro-batch, and called by its name. And tasks
without one agree.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A planted mistake, the first difference between 1 and 2 workers, and what is said of it."""

    fault: str
    kind: str
    slot: int | None
    """The micro-batch."""
    where: str
    """A part of the sentence."""
    why: tuple[str, ...]
    """Parts of the explanation."""
    name: str | None = None
    """The parameter, where it is named."""
    step: int = 1
    steps: int = 1
    exact: bool = True
    source: Path = SOURCE


def result(fault: str, slot: int, *why: str) -> Mistake:
    """One that changes the result of a micro-batch from equal samples and weights."""
    ranks = f"(of rank 0 of 1 and of rank {slot // 2} of 2)"
    where = f"step 1, micro-batch {slot} {ranks}: from the same samples and weights its loss is "
    return Mistake(fault=fault, kind="loss", slot=slot, name="last.bias", where=where, why=why)


def samples(fault: str, slot: int, *why: str) -> Mistake:
    where = " are not the same on 1 worker and on 2 workers"
    return Mistake(fault=fault, kind="samples", slot=slot, where=where, why=why)


KEYED = "randomness outside the keyed streams"
FAST = [
    result("own generator", 2, KEYED, "random.Random.random()", line("own generator")),
    Mistake(
        fault="nondeterministic backward",
        kind="gradient",
        slot=2,
        name="last.bias",
        where="its loss is the same, but the gradient of last.bias differs (norms ",
        why=("draws from random.Random.random()",),
    ),
    samples(
        "rank in the samples",
        2,
        "the dataset depends on the rank",
        f'os.environ["RANK"] {line("rank in the samples")}',
    ),
    # The trainings agree until a rank reads a sample again that another one had read first: in
    # the second epoch.
    Mistake(
        fault="sample edited",
        kind="again",
        slot=0,
        where="change when they are read again after the training",
        why=("a sample is edited in place: reading these samples twice in one process",),
    ),
]
REST = [
    result("own torch generator", 2, KEYED, "a torch.Generator of the task's own"),
    result(
        "dropout by rank",
        2,
        *("seeded by the rank", "torch.manual_seed()", "torch.distributed.get_rank()"),
        line("dropout"),
    ),
    result("clock", 0, "time-based seed", f"time.time() {line('clock')}", "torch.manual_seed()"),
    result("world size", 0, "depends on the number of workers", line("world size")),
    result("counter", 2, "kept from one call to the next", "a counter"),
    samples(
        "rank in the data set's constructor",
        2,
        "the dataset depends on the rank",
        f'os.environ["RANK"] {line("constructor")}',
    ),
    samples("samples of an own generator", 0, KEYED, "numpy.random.default_rng()"),
    Mistake(
        fault="batch edited",
        kind="again",
        slot=0,
        where="change when they are read again after the training",
        why=("a sample is edited in place: it changes after the model and the loss have used it",),
    ),
    Mistake(
        fault="start",
        kind="start",
        step=0,
        slot=None,
        name="last.bias",
        where="before the first step last.bias differs between 1 worker and 2 workers",
        why=(
            "building the model twice in one process, from the same random streams, gives two"
            f" results, and it reads the clock: time.time_ns() {line('start')}",
        ),
    ),
    # Exact mode fixes the number of threads; else the ranks of a host share its cores.
    Mistake(
        fault="threads",
        exact=False,
        kind="loss",
        slot=0,
        where="",
        why=(
            "depends on the number of intra-op threads",
            f"torch.get_num_threads() {line('threads')}. With --exact",
        ),
    ),
    # In size it is like rounding: values alone would not tell. Trained with exact, it shows where
    # it begins.
    Mistake(
        fault="loss by rank",
        source=AMPLIFYING,
        exact=False,
        steps=5,
        kind="loss",
        slot=4,
        where="",
        why=(
            "the result depends on the rank: when this process acts as another rank, it gets"
            ' another one: os.environ["RANK"]',
        ),
    ),
    Mistake(
        fault="optimizer by size",
        source=AMPLIFYING,
        exact=False,
        kind="weights",
        slot=None,
        name="0.weight",
        where="",
        why=("the optimizer, or a buffer",),
    ),
]


@pytest.mark.parametrize(
    "mistake",
    [*FAST, *(pytest.param(mistake, marks=pytest.mark.rest) for mistake in REST)],
    ids=lambda mistake: mistake.fault,
)
def test_a_mistake_is_found_and_called_by_its_name(tmp_path: Path, mistake: Mistake) -> None:
    found = look(
        tmp_path,
        mistake.fault,
        exact=mistake.exact,
        steps=mistake.steps,
        source=mistake.source,
    )
    difference = found.difference
    assert difference is not None
    assert found.where is not None
    assert found.why is not None
    expected = (mistake.kind, mistake.step, mistake.slot)
    assert (difference.kind, difference.step, difference.slot) == expected
    if mistake.name is not None:
        assert difference.name == mistake.name
        assert mistake.name in found.where
    assert mistake.where in found.where
    if mistake.kind == "samples":
        assert difference.epoch == 0
        assert f"({', '.join(map(str, difference.indices or ()))})" in found.where
    assert [words for words in mistake.why if words not in found.why] == []
    # samples that are edited differ when they are read again: the trainings agree
    assert [row.same for row in found.rows] == [True, mistake.kind == "again"]
    assert found.amplified == ()


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.rest)])
def test_a_task_without_a_mistake(tmp_path: Path, exact: bool) -> None:
    found = look(tmp_path, "", exact=exact, counts=(1, 2, 3), steps=4)
    assert (found.difference, found.where, found.why) == (None, None, None)
    assert [(row.workers, row.steps, row.same) for row in found.rows] == [
        (1, 4, True),
        (2, 4, True),
        (3, 4, True),
    ]
    assert len({row.sha256 for row in found.rows}) == 1 or not exact


@pytest.mark.rest
@pytest.mark.parametrize("fault", ["random.random", "threads"])
def test_what_the_keyed_streams_and_exact_mode_cover_is_no_mistake(
    tmp_path: Path, fault: str
) -> None:
    assert look(tmp_path, fault, steps=2).difference is None


@pytest.mark.parametrize(
    ("fault", "alike"),
    [("all samples seeded alike", True), pytest.param("noise", False, marks=pytest.mark.rest)],
)
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


@pytest.mark.rest
def test_rounding_that_the_optimizer_amplifies_is_no_alarm(tmp_path: Path) -> None:
    found = look(tmp_path, "", exact=False, counts=(1, 2, 3), steps=5, source=AMPLIFYING)
    assert (found.difference, found.where, found.why) == (None, None, None)
    assert [row.same for row in found.rows] == [True, True, True]
    assert len({row.sha256 for row in found.rows}) == 3
    assert [each.workers for each in found.amplified] == [(1, 2), (1, 3)]
    assert found.as_json()["same"] is True
    names = [each["name"] for each in found.as_json()["amplified_rounding"]]
    assert names == [each.name for each in found.amplified]
