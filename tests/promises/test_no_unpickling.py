"""Nothing that Lockstep reads from a file or from the network is unpickled: no call in the source
could do it, but for pipes between a process and its own children, and what Ray carries.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep

SOURCE = Path(lockstep.__file__).parent
PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
READERS = {"load", "loads", "Unpickler", "open"}
ALLOWED = {
    "launcher/call.py",
    "launcher/fork_server.py",
    "launcher/launch.py",
    "integrations/ray_cluster/driver.py",
    "integrations/ray_cluster/node.py",
    "data/keyed.py",
}
"""What a launcher gives to its ranks and gets back, and loader workers' batches."""


def unpickling(source: str) -> Iterator[str]:
    """The calls and functions in a module that unpickle."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLERS:
            yield f"line {node.lineno}: from {node.module} import ..."
        elif isinstance(node, ast.Attribute) and node.attr in READERS:
            of = ast.unparse(node.value)
            if of in PICKLERS or of.startswith(("torch", "ForkingPickler")):
                yield f"line {node.lineno}: {of}.{node.attr}"
        elif isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list")):
            of = ast.unparse(node.value)
            if of in ("dist", "c10d"):  # torch.distributed
                yield f"line {node.lineno}: {of}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"line {node.value.lineno}: allow_pickle"


def test_no_code_unpickles_what_it_reads() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): list(unpickling(path.read_text()))
        for path in sorted(SOURCE.rglob("*.py"))
    }
    assert {name: calls for name, calls in found.items() if calls and name not in ALLOWED} == {}
    assert {name for name in ALLOWED if not found[name]} == set()


@pytest.mark.parametrize(
    "line",
    [
        "import torch; torch.load(file, weights_only=True)",
        "import pickle; pickle.load(file)",
        "from pickle import loads",
        "import torch.distributed as dist; dist.all_gather_object(found, mine)",
        "import numpy as np; np.load(file, allow_pickle=True)",
    ],
)
def test_such_a_call_would_be_found(line: str) -> None:
    assert len(list(unpickling(line))) == 1
