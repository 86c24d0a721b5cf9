"""`pytest docs/course -k lesson3` grades your exercise; `--solutions` grades the solutions."""

from __future__ import annotations

from pathlib import Path

import pytest
from measure import STAGES

GRADERS = sorted(
    (path.stem for path in Path(__file__).with_name("graders").glob("lesson*.py")),
    key=lambda name: int(name.removeprefix("lesson")),
)
GRADERS += [f"bug{number}" for number in range(1, 13)]
GRADERS += [f"trainer_{stage}" for stage in STAGES]
GRADERS += ["capstone"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--solutions", action="store_true", help="Grade docs/course/solutions, not your exercises."
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folder = "solutions" if metafunc.config.getoption("solutions") else "exercises"
    metafunc.parametrize(("folder", "lesson"), [(folder, name) for name in GRADERS], ids=GRADERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-k lesson1` grades lesson 1 alone, and not lesson 10 too."""
    if (asked := config.option.keyword) in GRADERS:
        items[:] = [item for item in items if item.name == f"test_lessons[{asked}]"]
