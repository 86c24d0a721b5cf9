"""Scripts of public projects, ported with `lockstep.prepare`: few lines, the old script's weights, the
same bits on any number of ranks, also after the SIGKILL of one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from benchmarks.ports import (
    PORTS,
    changed_lines,
    difference,
    exact_shas,
    folder_of,
    killed_and_resumed,
)


def test_every_port_is_tried() -> None:
    assert {path.parent.name for path in folder_of("").glob("*/prepared.py")} == PORTS.keys()


@pytest.mark.parametrize("name", PORTS)
def test_a_port_adds_few_lines(name: str) -> None:
    added, _ = changed_lines(name)
    assert 3 <= added <= PORTS[name].limit


COMPARED = [name for name, port in PORTS.items() if port.equal]


@pytest.mark.rest
@pytest.mark.parametrize("name", ["mnist", "nanogpt", "vae"])  # all are compared in float64
def test_a_port_trains_what_the_plain_script_trains(name: str, tmp_path: Path) -> None:
    assert difference(name, tmp_path) <= 1e-6


@pytest.mark.rest
@pytest.mark.parametrize("name", COMPARED)
def test_a_port_in_float64_trains_what_the_plain_script_trains(name: str, tmp_path: Path) -> None:
    assert difference(name, tmp_path, double=True) <= 1e-12


@cache
def shas_of(name: str) -> set[str]:
    with TemporaryDirectory() as folder:
        return exact_shas(name, Path(folder))


@pytest.mark.rest
@pytest.mark.parametrize("name", PORTS)
def test_a_port_has_the_same_bits_on_1_2_and_3_ranks(name: str) -> None:
    assert len(shas_of(name)) == 1


@pytest.mark.rest
@pytest.mark.parametrize("name", PORTS)
def test_a_port_resumes_with_the_same_bits_at_another_size(name: str, tmp_path: Path) -> None:
    assert killed_and_resumed(name, tmp_path) == shas_of(name)
