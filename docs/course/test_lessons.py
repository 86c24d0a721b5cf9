"""One test a lesson: its grader, on your exercise."""

from __future__ import annotations

import pytest
from grading import Wrong, grade


def test_lessons(folder: str, lesson: str) -> None:
    said = ""
    try:
        grade(folder, lesson)
    except Wrong as wrong:
        said = str(wrong)
    if said:
        pytest.fail(said, pytrace=False)
