"""Every code block of every how-to page does what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, not_run, run_page

pytestmark = pytest.mark.rest

HOW_TO = ROOT / "docs" / "how-to"
PAGES = sorted(HOW_TO.glob("[!R]*.md"))
NOT_RUN = {
    "docker": ["it needs Docker", "it needs Docker"],
    "kubernetes": ["it needs a Kubernetes cluster; tests/test_kubernetes.py"],
    "quiet-output": ["it edits the settings of a shell; tests/cli"],
    "ray-cluster": [
        "`ray stop` would end every Ray process of the user; tests/launcher/ray",
        "it needs two machines; tests/launcher/ray",
    ],
    "ray-train": ["it needs a Ray cluster; tests/integrations/test_ray_train.py"],
    "slurm": ["it needs a SLURM cluster; tests/launcher/slurm submits such a job to a real one"],
    "two-machines": ["it needs two machines; tests/cli/test_nodes.py has two network namespaces"],
    "verify-in-ci": ["GitHub runs it; same-bits.md and check-a-script.md run its commands"],
}


def test_few_blocks_are_not_run() -> None:
    found = {page.stem: [reason for _, reason in not_run(page)] for page in PAGES}
    assert {page: reasons for page, reasons in found.items() if reasons} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    run_page(page, folder)
