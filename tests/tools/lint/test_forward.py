"""forward-through-module: torch's wrapper gone past in training, and the cases in which that is
meant.
"""

from __future__ import annotations

import pytest

from tests.tools.lint.snippets import agrees

TORCH = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
SNIPPETS = {
    "in one function": """
def main():
    model = DDP(net)
    for x in loader:
        loss = model.module(x).mean()  # <- forward-through-module
        loss.backward()
""",
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
    "of the module's scope": """
model = DDP(net)
def train():
    model.eval()
    model.train()
    model.module(x).backward()  # <- forward-through-module
""",
    "with gradients, as the call says": """
model = DDP(net)
with torch.set_grad_enabled(True):
    model.module(x).backward()  # <- forward-through-module
""",
    "through the wrapper": "model = DDP(net)\nmodel(x).backward()\n",
    "without gradients": (
        "model = DDP(net)\nloss.backward()\nwith torch.no_grad():\n    model.module(x)\n"
    ),
    "perhaps without gradients": (
        "model = DDP(net)\nloss.backward()\nwith torch.set_grad_enabled(training):\n"
        "    model.module(x)\n"
    ),
    "a decorator": (
        "model = DDP(net)\n@torch.inference_mode()\ndef f():\n    model.module(x)\n   "
        " loss.backward()\n"
    ),
    "in eval mode": "model = DDP(net)\nloss.backward()\nmodel.eval()\nmodel.module(x)\n",
    "detached": "model = DDP(net)\ntarget = model.module(x).detach()\nloss.backward()\n",
    "no backward": "model = DDP(net)\nmodel.module(x)\n",
    "another model's gradients": "G, D = DDP(g), DDP(d)\nloss = D.module(G(z))\nloss.backward()\n",
    "frozen": "D = DDP(d)\nD.requires_grad_(False)\nD.module(fake).backward()\n",
    "reduced by hand, flat": (
        "model = DDP(net)\nmodel.module(x).backward()\nflat = cat([p.grad for p in"
        " ps])\ndist.all_reduce(flat)\n"
    ),
    "reduced by a function": (
        "model = DDP(net)\nmodel.module(x).backward()\nall_reduce_mean(model.parameters())\n"
    ),
    "reduced by hand": "model = DDP(net)\nmodel.module(x).backward()\naverage_gradients(model)\n",
    "another attribute": (
        "model = DDP(net)\nmodel.module.loss(y)\nloss.backward()\nmodel.module.state_dict()\n"
    ),
    "not a wrapper": "model = Box(net)\nmodel.module(x).backward()\n",
    "a parameter that has the name": (
        "model = DDP(net)\ndef f(model):\n    model.module(x).backward()\n"
    ),
    "a function in it": (
        "def f():\n    model = DDP(net)\n    model.module(x)\n    def g():\n       "
        " loss.backward()\n"
    ),
    "perhaps Lockstep's": (
        "import lockstep\nmodel = lockstep.DistributedDataParallel(net)\nif other:\n    model ="
        " DDP(net)\nmodel.module(x).backward()\n"
    ),
}
MISTAKE = "model.module(x).backward()  # <- forward-through-module\n"


@pytest.mark.parametrize("name", SNIPPETS)
def test_the_marked_lines_are_reported(name: str) -> None:
    agrees(TORCH + SNIPPETS[name])


@pytest.mark.parametrize(
    "made",
    [
        "import torch\nmodel = torch.nn.parallel.DistributedDataParallel(net)\n",
        "from torch import nn\nmodel = nn.parallel.DistributedDataParallel(net, device_ids=[0])\n",
        "from torch.nn.parallel import *\nmodel = DistributedDataParallel(net)\n",
    ],
)
def test_however_it_is_imported(made: str) -> None:
    agrees(made + MISTAKE)


@pytest.mark.parametrize(
    "imported",
    [
        "from lockstep import DistributedDataParallel as DDP\n",
        "import lockstep\nDDP = lockstep.DistributedDataParallel\n",
        "from mine import DDP\n",
        "class DDP: ...\n",
        "",
    ],
)
def test_hooks_on_the_parameters_see_it_and_of_other_wrappers_nothing_is_known(
    imported: str,
) -> None:
    agrees(imported + "model = DDP(net)\nmodel.module(x).backward()\n")
