"""Which of several failures was the cause, and what a user reads about it."""

from __future__ import annotations

import os
import random
import runpy
import signal
from pathlib import Path

import pytest

from lockstep.errors import (
    BarrierTimeout,
    CorruptResult,
    LockstepError,
    PeerFailed,
    ReplicaDivergence,
    UsageError,
)
from lockstep.launcher import failures
from lockstep.launcher.failures import Failure


def _caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def _record(error: BaseException, rank: int, monotonic_ns: int) -> Failure:
    setattr(error, failures._STAMP, monotonic_ns)
    return failures.of_exception(_caught(error), rank)


LOST = "[pair.cc:537] Read error [127.0.0.1]:39312: Connection reset by peer"


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
        _record(RuntimeError(LOST), 3, 300),
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


def test_a_file_that_cannot_be_parsed_is_shown_with_its_line_and_no_frames_of_ours(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\nx = 1\n")
    with pytest.raises(IndentationError) as caught:
        runpy.run_path(str(script))
    # from runpy on, as under the launcher
    shown = failures.of_exception(caught.value.with_traceback(caught.tb.tb_next), 0).traceback
    first, *_, last = shown.splitlines()
    assert first.strip().startswith(f'File "{script}", line ')
    assert last.startswith("IndentationError: ")


def test_a_record_has_the_time_of_the_first_note_and_a_lost_connection_is_a_consequence() -> None:
    error = _caught(ValueError("boom"))
    noted = failures.note_time(error)
    assert failures.of_exception(error, 0).monotonic_ns == noted
    error = ValueError("the ranks could not agree")
    error.__cause__ = RuntimeError(LOST)
    assert failures.of_exception(error, 0).standing == "consequence"


@pytest.mark.parametrize(
    ("error", "kind", "code", "message"),
    [
        (ValueError("boom"), "exception", 1, "ValueError: boom"),
        (ValueError(), "exception", 1, "ValueError"),
        (UsageError("workers=0"), "usage", 2, "workers=0"),
        (SystemExit(3), "exit", 3, ""),
        (SystemExit(), "exit", 0, ""),
        (SystemExit(-1), "exit", 255, ""),
        (SystemExit("sorry"), "exit", 1, "sorry"),
        (KeyboardInterrupt(), "exit", 130, "KeyboardInterrupt"),
    ],
)
def test_kinds_and_codes(error: BaseException, kind: str, code: int, message: str) -> None:
    record = failures.of_exception(_caught(error), 2)
    assert (record.kind, record.code, record.message) == (kind, code, message)
    assert (record.rank, record.pid) == (2, os.getpid())


def test_what_computes_wrong_is_one_rank_although_all_say_so() -> None:
    error = CorruptResult("corrupt-sum", parameter="w", ranks=[1])
    records = [failures.of_exception(_caught(error), rank) for rank in range(3)]
    assert [each.kind for each in records] == ["corrupt"] * 3
    cause = failures.first(records)
    assert cause is not None
    assert cause.rank == 1
    both = CorruptResult("ranks-compute-differently", parameter="w", ranks=[0, 1])
    assert failures.of_exception(_caught(both), 0).kind == "exception"


class Silent(Exception):
    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_an_exception_without_a_text_is_told_by_its_type_and_place() -> None:
    record = failures.of_exception(_caught(Silent()), 2)
    assert (record.kind, record.code) == ("exception", 1)
    assert record.message.startswith("Silent: ")
    assert __file__ in record.traceback
    assert "failed: Silent: " in failures.render(record).splitlines()[-1]


def test_the_cause_of_an_error_that_begins_with_an_empty_line_is_its_last_line() -> None:
    """As torch's ProcessRaisedException, which holds the traceback of a process."""
    text = "\n\n-- Process 1 terminated:\nTraceback:\n  File x\nValueError: of process 1\n"
    record = failures.of_exception(RuntimeError(text), 0)
    assert failures.render(record).endswith("failed: RuntimeError: ValueError: of process 1")


def test_a_sys_exit_in_the_middle_of_our_work_is_a_failure_with_its_line() -> None:
    for argument, called, code in (
        (0, "sys.exit(0)", 1),
        (None, "sys.exit()", 1),
        (3, "sys.exit(3)", 3),
    ):
        record = failures.of_exception(_caught(SystemExit(argument)), 2, may_exit=False)
        assert (record.kind, record.code, record.message) == ("exit", code, called)
        last = failures.render(record).splitlines()[-1]
        assert f" was ended by {called} ({__file__}:" in last
        assert __file__ in record.traceback


def test_the_code_of_a_ranks_error_survives_and_any_other_failure_has_one() -> None:
    refused = LockstepError("store-not-started", address="a:1", why="in use")
    ours = failures.of_exception(_caught(refused), 2)
    error = failures.worker_failed(ours)
    assert (error.code, error.rank) == ("store-not-started", 2)
    assert failures.render(ours).splitlines()[-1].endswith(" [store-not-started]")
    other = failures.worker_failed(failures.of_exception(_caught(ValueError("boom")), 1))
    assert other.code == "rank-failed"
    first, *rest = str(other).splitlines()
    assert first.endswith("failed: ValueError: boom [rank-failed]")
    assert "\n".join(rest).strip() == other.traceback.strip()


def through_ours(error: BaseException) -> None:
    """Raise it in a frame of this package."""
    file = failures.PACKAGE + "launcher/made_up.py"
    exec(compile("raise error", file, "exec"), {"error": error})


def test_what_is_raised_on_purpose_ends_with_the_users_frame() -> None:
    with pytest.raises(ReplicaDivergence) as found:
        through_ours(ReplicaDivergence("'a.weight' differs", parameter="a.weight", ranks=[1]))
    record = failures.of_exception(found.value, 0)
    assert "made_up.py" not in record.traceback
    assert __file__ in record.traceback
    # of a training of ours no frame is the user's
    found.value.__traceback__ = found.tb.tb_next.tb_next
    record = failures.of_exception(found.value, 0)
    assert record.traceback == ""
    assert failures.render(record).endswith("failed: ReplicaDivergence: 'a.weight' differs")


def test_frames_of_the_launcher_are_left_out_also_in_linked_exceptions() -> None:
    try:
        try:
            through_ours(KeyError("inner"))
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as outer:
        record = failures.of_exception(outer, 0)
    assert "inner" in record.traceback
    assert "outer" in record.traceback
    assert record.traceback.count(__file__) == 3
    # the frame inside comes after the user's, so it stays: only the way in is cut
    assert record.traceback.count("made_up.py") == 1


def test_a_rank_that_finished_early_is_noted_only_for_a_complaint() -> None:
    complaint, boom = _record(RuntimeError(LOST), 0, 1), _record(ValueError("boom"), 1, 2)
    assert (
        failures.finished_early([complaint], [2])
        == "rank 2 had finished before that: do all ranks take the same number of steps?"
    )
    assert not failures.finished_early([complaint, boom], [2])
    assert not failures.finished_early([complaint], [])
