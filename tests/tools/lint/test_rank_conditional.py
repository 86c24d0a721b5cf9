"""rank-conditional-collective: what all ranks must call, called by some; and the many ways in
which the others call it too.
"""

from __future__ import annotations

from textwrap import indent

import pytest

from tests.tools.lint.snippets import agrees

IMPORTS = """
import os, time, torch, lockstep
import torch.distributed as dist
from torch.distributed import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP
"""
RANK = "rank-conditional-collective"
CONDITIONS = [
    "rank == 0",
    "0 == rank",
    "not rank",
    "(rank) == (0)",
    "rank != 0",
    "rank > 0",
    "rank == 1",
    "dist.get_rank() == 0",
    "torch.distributed.get_rank() == 0",
    "self.rank == 0",
    "world.rank == 0",
    "args.local_rank in (-1, 0)",
    "is_main_process()",
    "accelerator.is_main_process",
    "trainer.is_global_zero",
    "master_process",
    'int(os.environ["RANK"]) == 0',
    'os.environ.get("LOCAL_RANK", "0") == "0"',
    "not dist.is_initialized() or dist.get_rank() == 0",
]
ON_RANK_0 = {  # below a model in torch's wrapper
    "imported by name": "all_gather(parts, t)  # <- R",
    "the world's group": "dist.all_reduce(t, group=dist.group.WORLD)  # <- R",
    "lockstep's": "lockstep.collectives.all_reduce(t)  # <- R\nlockstep.evaluate(task)  # <- R",
    "nested": "for x in y:\n    with z:\n        dist.barrier()  # <- R",
    "the forward of the wrapper": "model.eval()\nout = model(x)  # <- R",
    "evaluation of the wrapper": "evaluate(model, loader)  # <- R",
    "of a group": "dist.all_reduce(t, group=some)\ndist.barrier(some)\ndist.broadcast(t, 0, some)",
    "not a collective": "world.mean(x)\nnumpy.mean(x)\nframe.reduce()\nbroadcast(x)\nx.all_gather",
    "defined, not called": "def hook():\n    dist.barrier()",
    "the module": "evaluate(model.module)\nmodel.module(x)\ntorch.save(model.state_dict(), f)",
}
OTHERS = {  # what other ranks do while rank 0 sends a broadcast
    "the same": "t = empty()\ndist.broadcast(t, 0)",
    "a function of the file": "receive()",
    "a function out of sight": "elsewhere()",
    "a module's out of sight": "mine.wait()",
}
METHOD = (
    "class A(B):\n    def run(self):\n        if self.rank == 0:\n            dist.barrier()\n     "
    "   else:\n            self.wait()\n"
)
SNIPPETS = {
    "and another condition": "if rank == 0 and step % 10 == 0:\n    dist.barrier()  # <- R",
    "the others only print": (
        "if rank == 0:\n    dist.barrier()  # <- R\nelse:\n    logger.info('waiting')\n   "
        " time.sleep(1)"
    ),
    "another collective on the other side": (
        "if rank == 0:\n    dist.broadcast(t, 0)  # <- R\nelse:\n    dist.barrier()  # <- R"
    ),
    "the world's": (
        "with lockstep.init() as world:\n    if world.rank == 0:\n        print(world.mean(loss,"
        " 1))  # <- R\n        world.barrier()  # <- R"
    ),
    "a world that is given": (
        "def save(world: lockstep.World):\n    if world.rank == 0:\n        world.agree(True)  #"
        " <- R"
    ),
    "after a return": "def save():\n    if rank != 0:\n        return\n    dist.barrier()  # <- R",
    "one line": "total = dist.all_reduce(t) if rank == 0 else None  # <- R",
    "short-circuit": "rank == 0 and dist.barrier()  # <- R",
    "a name for the test": "main = dist.get_rank() == 0\nif main:\n    dist.barrier()  # <- R",
    "in a function of the file": (
        "def total(t):\n    dist.all_reduce(t)\n    return t\nif rank == 0:\n    print(total(t))  #"
        " <- R"
    ),
    "accelerate": "if accelerator.is_main_process:\n    accelerator.wait_for_everyone()  # <- R",
    "the forward of lockstep's wrapper": (
        "model = lockstep.DistributedDataParallel(net)\nif rank == 0:\n    out = model(x)  # <- R"
    ),
    "validation that calls it, and that does not": """
def validate(m, loader):
    return [m(x) for x in loader]
def validate_module(m):
    return m.module(x)
def main():
    model = DDP(net)
    if rank == 0:
        validate_module(model)
        validate(model, loader)  # <- R
""",
    "for all": "dist.barrier()\nif rank == 0:\n    print(1)",
    "the others first": (
        "def first():\n    if rank != 0:\n        dist.barrier()\n    prepare()\n    if rank =="
        " 0:\n        dist.barrier()"
    ),
    "as older scripts say it": (
        "if local_rank not in [-1, 0]:\n    dist.barrier()\nprepare()\nif local_rank == 0:\n   "
        " dist.barrier()"
    ),
    "two ranks": "if rank == 0:\n    dist.all_reduce(a)\nif rank == 1:\n    dist.all_reduce(b)",
    "by a method": f"{METHOD}    def wait(self):\n        dist.barrier()",
    "by a method out of sight": METHOD,
    "for one rank by its decorator": (
        "@rank_zero_only\ndef f():\n    dist.barrier()\nif rank == 0:\n    f()"
    ),
    "by a function, then return": (
        "def work():\n    dist.barrier()\ndef main():\n    if rank != 0:\n        work()\n       "
        " return\n    dist.barrier()"
    ),
    "point to point": "if rank == 0:\n    dist.send(t, 1)\nelse:\n    dist.recv(t, 0)",
    "the group's rank": (
        "if group.rank == 0:\n    dist.barrier()\nif dist.get_rank(leaders) == 0:\n   "
        " dist.barrier()"
    ),
    "first": (
        "with lockstep.init() as world, world.first() as first:\n    if first:\n        prepare()\n"
        "    world.barrier()"
    ),
    "only one process": "if rank == 0 and world_size == 1:\n    dist.barrier()",
    "a number of a loop": (
        "for rank, row in enumerate(rows):\n    if rank == 0:\n        dist.all_reduce(row)"
    ),
    "no buffers sent": """
model = DDP(net, broadcast_buffers=False)
other = lockstep.DistributedDataParallel(net, forward_sync_buffers=False)
if rank == 0:
    evaluate(model, other)
    evaluate(other)
""",
    "a function that may not": (
        "def total(t, joint=False):\n    if joint:\n        dist.all_reduce(t)\n    return t\nif"
        " rank == 0:\n    total(t)"
    ),
    "another condition": "if epoch == 0 and world_size > 1:\n    dist.barrier()",
}
for name, text in ON_RANK_0.items():
    SNIPPETS[name] = f"model = DDP(net)\nif rank == 0:\n{indent(text, '    ')}"
RECEIVE = "import mine\nfrom mine import elsewhere\ndef receive():\n    dist.broadcast(t, 0)\n"
for name, text in OTHERS.items():
    SNIPPETS[f"the others: {name}"] = (
        f"{RECEIVE}if rank == 0:\n    dist.broadcast(t, 0)\nelse:\n{indent(text, '    ')}"
    )


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions(condition: str) -> None:
    agrees(f"{IMPORTS}if {condition}:\n    dist.barrier()  # <- {RANK}\n")
    agrees(f"{IMPORTS}if {condition}:\n    print()\nelse:\n    dist.barrier()  # <- {RANK}\n")
    agrees(f"{IMPORTS}if {condition}:\n    dist.barrier()\nelse:\n    dist.barrier()\n")


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(IMPORTS + SNIPPETS[name].replace("# <- R", f"# <- {RANK}"))
