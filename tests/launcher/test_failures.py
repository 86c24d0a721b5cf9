"""Which of several failures was the cause, and what a user reads about it."""

from __future__ import annotations

import random
import signal

from torch.multiprocessing import ProcessRaisedException

from lockstep.errors import (
    BarrierTimeout,
    CorruptResult,
    LockstepError,
    PeerFailed,
    UsageError,
)
from lockstep.launcher import failures
from lockstep.runtime import failure_record
from lockstep.runtime.failure_record import Failure
from tests.runtime.test_failure_record import LOST_CONNECTION


def _caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def _record(error: BaseException, rank: int, monotonic_ns: int) -> Failure:
    setattr(error, failure_record._STAMP, monotonic_ns)
    return failure_record.of_exception(_caught(error), rank)


def test_the_cause_is_found_by_kind_then_by_time() -> None:
    """In the order of precedence, each later in time than the next: time alone would give the
    reverse.
    """
    errors = [
        _record(UsageError("workers=0: give at least 1"), 8, 600),
        failures.of_exit(-signal.SIGKILL, 7, 100),
        _record(ValueError("boom"), 6, 500),
        _record(BarrierTimeout("rank 6 did not reach the barrier", missing=[6]), 5, 400),
        _record(RuntimeError("Timed out waiting 1000ms for recv operation to complete"), 4, 450),
        _record(RuntimeError(LOST_CONNECTION), 3, 300),
        _record(PeerFailed("rank 6 failed in first()"), 2, 350),
        _record(ConnectionResetError("gone"), 1, 360),
    ]
    for wanted in errors:
        shuffled = list(errors)
        random.shuffle(shuffled)
        assert failures.first(shuffled) == wanted
        errors = [error for error in errors if error is not wanted]
    assert failures.first([]) is None
    early, late = _record(ValueError("early"), 1, 10), _record(KeyError("late"), 0, 20)
    assert failures.first([late, early]) == early


def test_what_computes_wrong_is_one_rank_although_all_say_so() -> None:
    error = CorruptResult("corrupt-sum", parameter="w", ranks=[1])
    records = [failure_record.of_exception(_caught(error), rank) for rank in range(3)]
    assert [each.kind for each in records] == ["corrupt"] * 3
    cause = failures.first(records)
    assert cause is not None
    assert cause.rank == 1
    both = CorruptResult("ranks-compute-differently", parameter="w", ranks=[0, 1])
    assert failure_record.of_exception(_caught(both), 0).kind == "exception"


class Silent(Exception):
    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_an_exception_without_a_text_is_told_by_its_type_and_place() -> None:
    record = failure_record.of_exception(_caught(Silent()), 2)
    assert (record.kind, record.code) == ("exception", 1)
    assert record.message.startswith("Silent: ")
    assert __file__ in record.traceback
    assert "failed: Silent: " in failures.render(record).splitlines()[-1]


def test_the_cause_of_an_error_that_begins_with_an_empty_line_is_its_last_line() -> None:
    """As torch's ProcessRaisedException, which holds the traceback of a process."""
    text = "\n\n-- Process 1 terminated:\nTraceback:\n  File x\nValueError: of process 1\n"
    record = failure_record.of_exception(RuntimeError(text), 0)
    assert failures.render(record).endswith("failed: RuntimeError: ValueError: of process 1")


def test_a_program_that_spawns_under_a_launcher_is_told_so() -> None:
    """Each of our ranks spawns all of the program's own, which then take one port."""
    text = "\n\n-- Process 1 terminated:\nValueError: of process 1\n"
    record = failure_record.of_exception(ProcessRaisedException(text, 1, 4711), 0)
    assert "start it with python, without a launcher" in failures.advice([record], [])


def test_a_sys_exit_in_the_middle_of_our_work_is_a_failure_with_its_line() -> None:
    for argument, called, code in (
        (0, "sys.exit(0)", 1),
        (None, "sys.exit()", 1),
        (3, "sys.exit(3)", 3),
    ):
        record = failure_record.of_exception(_caught(SystemExit(argument)), 2, may_exit=False)
        assert (record.kind, record.code, record.message) == ("exit", code, called)
        last = failures.render(record).splitlines()[-1]
        assert f" was ended by {called} ({__file__}:" in last
        assert __file__ in record.traceback


def test_the_code_of_a_ranks_error_survives_and_any_other_failure_has_one() -> None:
    refused = LockstepError("store-not-started", address="a:1", why="in use")
    ours = failure_record.of_exception(_caught(refused), 2)
    error = failures.worker_failed(ours)
    assert (error.code, error.rank) == ("store-not-started", 2)
    assert failures.render(ours).splitlines()[-1].endswith(" [store-not-started]")
    other = failures.worker_failed(failure_record.of_exception(_caught(ValueError("boom")), 1))
    assert other.code == "rank-failed"
    first, *rest = str(other).splitlines()
    assert first.endswith("failed: ValueError: boom [rank-failed]")
    assert "\n".join(rest).strip() == other.traceback.strip()


def test_a_rank_that_finished_early_is_noted_only_for_a_complaint() -> None:
    complaint, boom = (
        _record(RuntimeError(LOST_CONNECTION), 0, 1),
        _record(ValueError("boom"), 1, 2),
    )
    assert (
        failures.advice([complaint], [2])
        == "rank 2 had finished before that: do all ranks take the same number of steps?"
    )
    assert not failures.advice([complaint, boom], [2])
    assert not failures.advice([complaint], [])


def test_many_ranks_are_named_as_ranges() -> None:
    assert failures.named(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
    assert failures.named({*range(1024)} - {5}) == "ranks 0-4,6-1023"
