"""forward-through-module: torch's wrapper gone past in training, and the cases in which that is
meant.
"""

from __future__ import annotations

import pytest

from tests.tools.lint.snippets import agrees

TORCH = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
SCRIPTS = {
    "by its forward, if distributed": """
def main():
    model = net
    if distributed:
        model = DDP(model)
    loss = model.module.forward(x)  # <- forward-through-module
    scaler.scale(loss).backward()
""",
    "a reduction of the loss is not one of the gradients": """
def main():
    model = DDP(net)
    loss = model.module(x).mean()  # <- forward-through-module
    loss.backward()
    dist.all_reduce(loss)
    torch.cuda.synchronize()
""",
    "an attribute": """
class Trainer:
    def __init__(self):
        self.model = DDP(net)
    def step(self, x):
        self.accelerator.backward(self.model.module(x))  # <- forward-through-module
""",
    "another model's gradients": "G, D = DDP(g), DDP(d)\nloss = D.module(G(z))\nloss.backward()\n",
    "frozen": "D = DDP(d)\nD.requires_grad_(False)\nD.module(fake).backward()\n",
    "not a wrapper": "model = Box(net)\nmodel.module(x).backward()\n",
    "a function in it": """
def f():
    model = DDP(net)
    model.module(x)
    def g():
        loss.backward()
""",
    "perhaps Lockstep's": """
import lockstep
model = lockstep.DistributedDataParallel(net)
if other:
    model = DDP(net)
model.module(x).backward()
""",
}
MISTAKE = "model.module(x).backward()  # <- forward-through-module\n"
WRAPPED = {
    "of the module's scope": f"def train():\n    model.eval()\n    model.train()\n    {MISTAKE}",
    "with gradients, as the call says": f"with torch.set_grad_enabled(True):\n    {MISTAKE}",
    "through the wrapper": "model(x).backward()\n",
    "without gradients": "loss.backward()\nwith torch.no_grad():\n    model.module(x)\n",
    "perhaps without": "loss.backward()\nwith torch.set_grad_enabled(on):\n    model.module(x)\n",
    "a decorator": "@torch.inference_mode()\ndef f():\n    model.module(x)\n    loss.backward()\n",
    "in eval mode": "loss.backward()\nmodel.eval()\nmodel.module(x)\n",
    "detached": "target = model.module(x).detach()\nloss.backward()\n",
    "no backward": "model.module(x)\n",
    "reduced by hand, flat": "model.module(x).backward()\nflat = cat([p.grad])\nall_reduce(flat)\n",
    "reduced by a function": "model.module(x).backward()\nall_reduce_mean(model.parameters())\n",
    "reduced by hand": "model.module(x).backward()\naverage_gradients(model)\n",
    "another attribute": "model.module.loss(y)\nloss.backward()\nmodel.module.state_dict()\n",
    "a parameter that has the name": "def f(model):\n    model.module(x).backward()\n",
}
SNIPPETS = SCRIPTS | {name: f"model = DDP(net)\n{text}" for name, text in WRAPPED.items()}


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(TORCH + SNIPPETS[name])


def test_however_it_is_imported() -> None:
    for made in (
        "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(net)\n",
        "from torch import nn\nmodel = nn.parallel.DistributedDataParallel(net, device_ids=[0])\n",
        "from torch.nn.parallel import *\nmodel = DistributedDataParallel(net)\n",
    ):
        agrees(made + MISTAKE)


def test_hooks_on_the_parameters_see_it_and_of_other_wrappers_nothing_is_known() -> None:
    for imported in (
        "from lockstep import DistributedDataParallel as DDP\n",
        "import lockstep\nDDP = lockstep.DistributedDataParallel\n",
        *("from mine import DDP\n", "class DDP: ...\n", ""),
    ):
        agrees(imported + "model = DDP(net)\nmodel.module(x).backward()\n")
