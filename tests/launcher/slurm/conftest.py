"""One SLURM for all tests of this folder. Where there can be none they are skipped, with the
reason; LOCKSTEP_REQUIRE_SLURM=1 makes that a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.launcher.slurm.cluster import Cluster, NoCluster, cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(cluster(tmp_path_factory.mktemp("slurm")))
        except NoCluster as error:
            if os.environ.get("LOCKSTEP_REQUIRE_SLURM") == "1":
                raise
            pytest.skip(f"no SLURM (Debian: slurm-wlm, munge): {error}")
        yield found
