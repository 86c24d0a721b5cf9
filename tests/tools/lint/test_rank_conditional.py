"""rank-conditional-collective: what all ranks must call, called by some; and the many ways in
which the others call it too.
"""

from __future__ import annotations

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
    "imported by name": "if rank == 0:\n    all_gather(parts, t)  # <- R",
    "another collective on the other side": (
        "if rank == 0:\n    dist.broadcast(t, 0)  # <- R\nelse:\n    dist.barrier()  # <- R"
    ),
    "the world's group": "if rank == 0:\n    dist.all_reduce(t, group=dist.group.WORLD)  # <- R",
    "lockstep's": (
        "if rank == 0:\n    lockstep.collectives.all_reduce(t)  # <- R\n    lockstep.evaluate(task)"
        "  # <- R"
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
    "nested": "if rank == 0:\n    for x in y:\n        with z:\n            dist.barrier()  # <- R",
    "in a function of the file": (
        "def total(t):\n    dist.all_reduce(t)\n    return t\nif rank == 0:\n    print(total(t))  #"
        " <- R"
    ),
    "accelerate": "if accelerator.is_main_process:\n    accelerator.wait_for_everyone()  # <- R",
    "the forward of the wrapper": (
        "model = DDP(net)\nif rank == 0:\n    model.eval()\n    out = model(x)  # <- R"
    ),
    "the forward of lockstep's wrapper": (
        "model = lockstep.DistributedDataParallel(net)\nif rank == 0:\n    out = model(x)  # <- R"
    ),
    "evaluation of the wrapper": (
        "model = DDP(net)\nif rank == 0:\n    evaluate(model, loader)  # <- R"
    ),
    "validation that calls it": (
        "def validate(m, loader):\n    return [m(x) for x in loader]\ndef main():\n    model ="
        " DDP(net)\n    if rank == 0:\n        validate(model, loader)  # <- R"
    ),
    "for all": "dist.barrier()\nif rank == 0:\n    print(1)",
    "on both sides": (
        "if rank == 0:\n    dist.broadcast(t, 0)\nelse:\n    t = empty()\n    dist.broadcast(t, 0)"
    ),
    "the others first": (
        "def first():\n    if rank != 0:\n        dist.barrier()\n    prepare()\n    if rank =="
        " 0:\n        dist.barrier()"
    ),
    "as older scripts say it": (
        "if local_rank not in [-1, 0]:\n    dist.barrier()\nprepare()\nif local_rank == 0:\n   "
        " dist.barrier()"
    ),
    "two ranks by number": (
        "if rank == 0:\n    dist.all_reduce(a)\nif rank == 1:\n    dist.all_reduce(b)"
    ),
    "by a function": (
        "def receive():\n    dist.broadcast(t, 0)\nif rank == 0:\n    dist.broadcast(t, 0)\nelse:\n"
        "    receive()"
    ),
    "by a function out of sight": (
        "from mine import receive\nif rank == 0:\n    dist.broadcast(t, 0)\nelse:\n    receive()"
    ),
    "by a method": f"{METHOD}    def wait(self):\n        dist.barrier()",
    "by a method out of sight": METHOD,
    "by a module out of sight": (
        "import mine\nif rank == 0:\n    dist.barrier()\nelse:\n    mine.wait()"
    ),
    "for one rank by its decorator": (
        "@rank_zero_only\ndef f():\n    dist.barrier()\nif rank == 0:\n    f()"
    ),
    "by a function, then return": (
        "def work():\n    dist.barrier()\ndef main():\n    if rank != 0:\n        work()\n       "
        " return\n    dist.barrier()"
    ),
    "point to point": "if rank == 0:\n    dist.send(t, 1)\nelse:\n    dist.recv(t, 0)",
    "of a group": (
        "if local_rank == 0:\n    dist.all_reduce(t, group=leaders)\n    dist.barrier(leaders)\n   "
        " dist.broadcast(t, 0, leaders)"
    ),
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
    "not a collective": (
        "if rank == 0:\n    world.mean(x)\n    numpy.mean(x)\n    frame.reduce()\n   "
        " broadcast(x)\n    print(x.all_gather)"
    ),
    "defined, not called": "if rank == 0:\n    def hook():\n        dist.barrier()",
    "the module": (
        "model = DDP(net)\nif rank == 0:\n    evaluate(model.module)\n    model.module(x)\n   "
        " torch.save(model.state_dict(), f)"
    ),
    "no buffers sent": (
        "model = DDP(net, broadcast_buffers=False)\nif rank == 0:\n    evaluate(model)"
    ),
    "lockstep's wrapper sends no buffers": (
        "model = lockstep.DistributedDataParallel(net, forward_sync_buffers=False)\nif rank == 0:\n"
        "    evaluate(model)"
    ),
    "validation of the module": (
        "def validate(m):\n    return m.module(x)\ndef main():\n    model = DDP(net)\n    if rank"
        " == 0:\n        validate(model)"
    ),
    "a function that may not": (
        "def total(t, joint=False):\n    if joint:\n        dist.all_reduce(t)\n    return t\nif"
        " rank == 0:\n    total(t)"
    ),
    "another condition": "if epoch == 0 and world_size > 1:\n    dist.barrier()",
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_conditions(condition: str) -> None:
    agrees(f"{IMPORTS}if {condition}:\n    dist.barrier()  # <- {RANK}\n")
    agrees(f"{IMPORTS}if {condition}:\n    print()\nelse:\n    dist.barrier()  # <- {RANK}\n")
    agrees(f"{IMPORTS}if {condition}:\n    dist.barrier()\nelse:\n    dist.barrier()\n")


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(IMPORTS + SNIPPETS[name].replace("# <- R", f"# <- {RANK}"))
