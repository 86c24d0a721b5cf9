"""The guide's TrainJob, RayJob and PyTorchJob: what they say is what a pod runs, and what an
operator sets is understood. And what the image is made of.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[1]


def manifests() -> dict[str, Any]:
    """By kind."""
    page = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    return {found["kind"]: found for block in blocks for found in yaml.safe_load_all(block)}


def test_the_train_job_names_its_runtime() -> None:
    runtime, job = manifests()["TrainingRuntime"], manifests()["TrainJob"]["spec"]
    assert (job["runtimeRef"]["kind"], job["runtimeRef"]["name"]) == (
        "TrainingRuntime",
        runtime["metadata"]["name"],
    )
    assert runtime["spec"]["mlPolicy"] == {"numNodes": job["trainer"]["numNodes"], "torch": {}}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"  # the trainer looks for this name and this label
    assert replicated["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }


def words(command: Sequence[str], folder: Path) -> list[str]:
    """A pod's command, of this interpreter and with its runs in the folder."""
    program, *args = command
    assert program == "lockstep"
    args = [argument.replace("/runs", str(folder)) for argument in args]
    return [sys.executable, "-m", "lockstep", *args]


def in_pods(
    command: Sequence[str], folder: Path, variables: Sequence[Mapping[str, object]]
) -> None:
    """Run the command once with each of these variables, at the same time, in processes of this
    host. The first one alone says what has been trained.
    """
    pods = [
        subprocess.Popen(
            [*words(command, folder), "--steps", "2"],
            cwd=folder,
            env={
                **os.environ,
                **{name: str(value) for name, value in pod.items()},
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for pod in variables
    ]
    outputs = [pod.communicate() for pod in pods]
    assert [pod.returncode for pod in pods] == [0] * len(pods), outputs
    ranks = sum(int(str(pod["PET_NPROC_PER_NODE"])) for pod in variables)
    assert outputs[0][0].startswith(f"digits: 2 steps, {ranks} workers, ")
    assert not any(out for out, _ in outputs[1:])
    assert (folder / "digits" / "result.json").exists()


def pet(rank: int, per_node: int, port: int) -> dict[str, object]:
    """What operators set for torchrun."""
    return {
        "PET_NNODES": 2,
        "PET_NPROC_PER_NODE": per_node,
        "PET_NODE_RANK": rank,
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }


@pytest.fixture
def port() -> Iterator[int]:
    """Held for the pods: nobody else gets it, and who binds it with SO_REUSEADDR may listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        number: int = held.getsockname()[1]
        yield number


def test_the_train_jobs_command_in_two_pods_of_two_ranks(tmp_path: Path, port: int) -> None:
    trainer = manifests()["TrainJob"]["spec"]["trainer"]
    cores = trainer["resourcesPerNode"]["limits"]["cpu"]
    nodes = range(trainer["numNodes"])
    in_pods(trainer["command"], tmp_path, [pet(node, cores, port) for node in nodes])


def test_the_pytorch_jobs_command_in_two_pods(tmp_path: Path, port: int) -> None:
    replicas = manifests()["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert {name: spec["replicas"] for name, spec in replicas.items()} == {"Master": 1, "Worker": 1}
    master, worker = (
        replicas[name]["template"]["spec"]["containers"][0]["command"]
        for name in ("Master", "Worker")
    )
    assert master == worker
    named = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "WORLD_SIZE": 2,
        "PYTHONUNBUFFERED": 1,
    }
    in_pods(master, tmp_path, [{**named, "RANK": rank, **pet(rank, 1, port)} for rank in range(2)])


def test_the_ray_jobs_cluster_has_room_for_its_ranks(tmp_path: Path) -> None:
    """Its entrypoint is a command that looks for a cluster, as far as it gets without one.
    tests/integrations/ray_cluster has what it does there.
    """
    job = manifests()["RayJob"]["spec"]
    (group,) = job["rayClusterSpec"]["workerGroupSpecs"]
    cores = group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    command = job["entrypoint"].split()
    room = f"{group['minReplicas'] * cores}:{group['maxReplicas'] * cores}"
    assert command[command.index("--workers") + 1] == room
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    ended = subprocess.run(
        words(command, tmp_path),
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "127.0.0.1:1" in ended.stderr


def test_the_image_is_made_of_what_is_here() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [
        source for line in lines if line.startswith("COPY ") for source in shlex.split(line)[1:-1]
    ]
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} == set(copied)
    assert all((ROOT / source).exists() for source in copied)
    (install,) = [line for line in lines if line.startswith("RUN pip install")]
    for requirement in re.findall(r'pip install ("torch.*?")', (ROOT / "README.md").read_text()):
        assert requirement in install
