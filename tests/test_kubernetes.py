"""The guide's PyTorchJob: what it says is what a pod runs, and what an operator sets is understood. And what the image is made of is there."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def manifest() -> Any:
    page = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    return yaml.safe_load(block)


def test_the_manifest_is_a_pytorch_job() -> None:
    found = manifest()
    assert (found["apiVersion"], found["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = found["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    for each in replicas.values():
        pod = each["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_its_command_in_two_pods(tmp_path: Path) -> None:
    """Two processes of one host stand for the pods; the variables are those that the operator sets."""
    replicas = manifest()["spec"]["pytorchReplicaSpecs"]
    commands = [replicas[name]["template"]["spec"]["containers"][0]["command"] for name in ("Master", "Worker")]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pods = []
    for rank, (program, *args) in enumerate(commands):
        assert program == "lockstep"
        args = [argument.replace("/runs", str(tmp_path)) for argument in args]
        operators = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank, "PYTHONUNBUFFERED": 1}
        operators |= {
            "PET_NNODES": 2,
            "PET_NODE_RANK": rank,
            "PET_NPROC_PER_NODE": 1,
            "PET_MASTER_ADDR": "localhost",
            "PET_MASTER_PORT": port,
        }
        env = {**os.environ, **{name: str(value) for name, value in operators.items()}, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "lockstep", *args, "--steps", "2"]
        pods.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [pod.communicate() for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert said[0][0].startswith("digits: 2 steps, 2 workers, ")
    assert said[1][0] == ""
    assert (tmp_path / "digits" / "result.json").exists()


def test_the_image_is_made_of_what_is_here() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [source for line in lines if line.startswith("COPY ") for source in shlex.split(line)[1:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} == set(copied)
    assert all((ROOT / source).exists() for source in copied)
    (install,) = [line for line in lines if line.startswith("RUN pip install")]
    for requirement in re.findall(r'pip install ("torch.*?")', (ROOT / "README.md").read_text()):
        assert requirement in install
