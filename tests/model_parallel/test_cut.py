"""Cut along the tensor axis, the shard axis or both, a model has the gradients and the weights
of one process over the same samples.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.config.mesh import Mesh
from lockstep.testing import run_ranks
from lockstep.world.world import World
from tests.model_parallel import cut_models as models

CASES = [
    ("gpt", "tensor=2"),
    ("gpt", "tensor=4"),
    ("gpt", "shard=2"),
    ("gpt", "shard=3"),
    ("gpt", "shard=4"),
    ("gpt", "shard=2,tensor=2"),
    ("gpt", "data=2,tensor=2"),
    ("words", "tensor=2"),
    ("words", "shard=2,tensor=2"),
    ("mlp", "tensor=2"),
    ("mlp", "shard=3"),
    ("mlp", "shard=2,tensor=2"),
    ("odd", "shard=2"),
    ("odd", "shard=3"),
    ("odd", "data=2,shard=2"),
]


def gradients_and_a_step(world: World, name: str, text: str) -> None:
    mesh = Mesh.read(text)
    model, here, axes = models.cut(world, name, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    here.adopt(optimizer)
    whole = models.alone(name)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(3):
        models.backward(world, name, mesh, model, here, axes)
        ours = dict(here.module.named_parameters())
        assert ours.keys() == dict(whole.named_parameters()).keys()
        for key, parameter in whole.named_parameters():
            if not parameter.requires_grad:
                assert ours[key].grad is None
                continue
            # later, gradients are of weights that AdamW has brought apart: it magnifies what is
            # small
            within = 1e-5 if step == 0 else 1e-4
            _close(
                f"step {step}, gradient of {key}",
                ours[key].grad,
                here.take(key, parameter.grad),
                within,
            )
        optimizer.step()
        theirs.step()
        for key, parameter in whole.named_parameters():
            _close(
                f"step {step}, {key}", ours[key].detach(), here.take(key, parameter.detach()), 1e-4
            )
        optimizer.zero_grad()
        theirs.zero_grad()
        models.loss(whole, models.batch(name)).backward()


def _close(what: str, found: Tensor, expected: Tensor, within: float) -> None:
    torch.testing.assert_close(
        found, expected, rtol=within, atol=within, msg=lambda said: f"{what}: {said}"
    )


def each_case(world: World) -> None:
    for name, mesh in CASES:
        if Mesh.read(mesh).size == world.size:
            try:
                gradients_and_a_step(world, name, mesh)
            except Exception as error:
                error.add_note(f"{name} over {mesh}")
                raise


@pytest.mark.parametrize("size", sorted({Mesh.read(mesh).size for _, mesh in CASES}))
def test_gradients_and_steps_are_those_of_one_process(size: int) -> None:
    """Ranks start once for all cases of a size."""
    run_ranks(each_case, size)
