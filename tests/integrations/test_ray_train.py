"""Ray Train starts the workers and restarts them at another size; the weights are those of one
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from tests.clusters import ON_LOOPBACK, Cluster, cluster
from tests.integrations import ray_script

pytestmark = pytest.mark.rest

# Ray Train looks every 2 s whether its workers live; what else it starts beside them costs this
# test time.
QUICK = {
    **ON_LOOPBACK,
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}


@pytest.fixture
def one() -> Iterator[Cluster]:
    with cluster(nodes=1) as made:
        yield made


def test_a_worker_is_killed_and_ray_restarts_at_another_size_with_the_same_bits(
    one: Cluster, tmp_path: Path
) -> None:
    alone, folder = tmp_path / "alone", tmp_path / "ray"
    folder.mkdir()
    driver = one.python(ray_script.__file__, one.address, str(folder), cwd=tmp_path, **QUICK)
    with lockstep.init():
        ray_script.train_fn({"folder": str(alone), "killed": False})
    before = (alone / "end").read_text()
    assert before.startswith("1 workers, from step None: ")
    driver.wait_for(folder / "waiting")
    one.add_node()
    (folder / "added").touch()
    code, _, err = driver.end()
    assert code == 0, err
    assert (folder / "end").read_text() == before.replace(
        "1 workers, from step None", "2 workers, from step 6"
    )
