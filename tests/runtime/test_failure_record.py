"""What a rank records of the error that ends it."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

from lockstep.errors import ReplicaDivergence, UsageError
from lockstep.runtime.failure_record import PACKAGE, note_time, of_exception


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


LOST_CONNECTION = "[pair.cc:537] Read error [127.0.0.1]:39312: Connection reset by peer"


def test_a_file_that_cannot_be_parsed_is_shown_with_its_line_and_no_frames_of_ours(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\nx = 1\n")
    with pytest.raises(IndentationError) as error_info:
        runpy.run_path(str(script))
    # from runpy on, as under the launcher
    shown = of_exception(error_info.value.with_traceback(error_info.tb.tb_next), 0).traceback
    first, *_, last = shown.splitlines()
    assert first.strip().startswith(f'File "{script}", line ')
    assert last.startswith("IndentationError: ")


def test_a_record_has_the_time_of_the_first_note_and_a_lost_connection_is_a_consequence() -> None:
    error = caught(ValueError("boom"))
    noted = note_time(error)
    assert of_exception(error, 0).monotonic_ns == noted
    error = ValueError("the ranks could not agree")
    error.__cause__ = RuntimeError(LOST_CONNECTION)
    assert of_exception(error, 0).standing == "consequence"


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
    record = of_exception(caught(error), 2)
    assert (record.kind, record.code, record.message) == (kind, code, message)
    assert (record.rank, record.pid) == (2, os.getpid())


def through_ours(error: BaseException) -> None:
    """Raise it in a frame of this package."""
    file = PACKAGE + "launcher/made_up.py"
    exec(compile("raise error", file, "exec"), {"error": error})


def test_what_is_raised_on_purpose_ends_with_the_users_frame() -> None:
    with pytest.raises(ReplicaDivergence) as found:
        through_ours(ReplicaDivergence("'a.weight' differs", parameter="a.weight", ranks=[1]))
    record = of_exception(found.value, 0)
    assert "made_up.py" not in record.traceback
    assert __file__ in record.traceback
    # of a training of ours no frame is the user's
    found.value.__traceback__ = found.tb.tb_next.tb_next
    record = of_exception(found.value, 0)
    assert record.traceback == ""
    assert record.message == "ReplicaDivergence: 'a.weight' differs"


def test_frames_of_the_launcher_are_left_out_also_in_linked_exceptions() -> None:
    try:
        try:
            through_ours(KeyError("inner"))
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as outer:
        record = of_exception(outer, 0)
    assert "inner" in record.traceback
    assert "outer" in record.traceback
    assert record.traceback.count(__file__) == 3
    # the frame inside comes after the user's, so it stays: only the way in is cut
    assert record.traceback.count("made_up.py") == 1
