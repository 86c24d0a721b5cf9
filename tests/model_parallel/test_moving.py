"""What ranks of one mesh write, ranks of any other take: to the bit, with one digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoints import files, folders
from lockstep.checkpoints.manifest import SealedFile
from lockstep.checkpoints.pieces import image, read_all
from lockstep.checks import identity
from lockstep.collectives.broadcast_json import everybodys
from lockstep.config.mesh import Mesh
from lockstep.model_parallel.split import ModelNames
from lockstep.model_parallel.split_form import sha256
from lockstep.world.world import World
from tests.model_parallel import cut_models as models
from tests.teams import on_team

LAYOUTS = ("data=1", "tensor=2", "shard=3", "shard=4", "shard=2,tensor=2", "data=2,shard=2")


def trained(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and what an optimizer would keep of them; numbers that no two tensors share."""
    model = models.build(name)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=draw))
    state = {}
    for key, parameter in model.named_parameters():
        state[f"exp_avg/{key}"] = torch.randn(parameter.shape, generator=draw)
        state[f"step/{key}"] = torch.tensor(7.0)
    return {key: tensor.clone() for key, tensor in identity.weights(model).items()}, state


def write(world: World, name: str, text: str, directory: Path) -> str:
    mesh = Mesh.read(text)
    model, here, axes = models.cut(world, name, mesh)
    for key, tensor in identity.weights(models.build(name)).items():  # as torch has cut it
        assert torch.equal(here.module.state_dict()[key], here.part(key, tensor)), key
    weights, state = trained(name)
    # FSDP has gathered once; then other values come
    models.loss(model, models.share(name, mesh, world.rank)).backward()
    here.load(weights.items())
    own = identity.weights(here.module)
    assert own.keys() == weights.keys()
    model_pieces, state_pieces = [], []
    for key in own:
        assert torch.equal(own[key], here.part(key, weights[key])), key
        model_pieces += here.pieces(key, key, own[key])
    for key, whole in state.items():
        parameter = key.partition("/")[2]
        state_pieces += here.pieces(key, parameter, here.part(parameter, whole))
    folder = folders.unfinished(directory, 5, text)
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    if mesh.at(world.rank).data == 0:
        parts = files.parts(model_pieces, state_pieces, world.rank)
        entries = files.write_parts(folder, {part.name: image(part) for part in parts})
    every = everybodys(
        [[entry.name, entry.bytes, entry.digest] for entry in entries],
        world.control,
        "for the entries",
    )
    if world.rank == 0:
        files.commit(
            folder,
            folders.folder_of(directory, 5),
            5,
            [SealedFile(*each) for part in every for each in part],
            {},
        )
    return sha256(here, axes.pipeline, ModelNames(models.build(name)))


CASES = [("gpt", text) for text in LAYOUTS] + [
    ("odd", text) for text in LAYOUTS if "tensor" not in text
]


def write_each(world: World, directory: Path) -> dict[tuple[str, str], str]:
    """The digests of all cases of as many ranks."""
    return {
        case: write(world, *case, directory / "-".join(case))
        for case in CASES
        if Mesh.read(case[1]).size == world.size
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """The folder of all cases, and the digests by number of ranks and rank."""
    folder = tmp_path_factory.mktemp("written")
    return folder, {size: on_team(write_each, size, (folder,)) for size in (1, 2, 3, 4)}


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_checkpoint_of_any_mesh_is_that_of_one_process(
    name: str, text: str, written: tuple[Path, dict[int, Any]]
) -> None:
    folder, mesh = written[0] / f"{name}-{text}", Mesh.read(text)
    weights, state = trained(name)
    digests = {rank[name, text] for rank in written[1][mesh.size]}
    assert digests == {identity.sha256(weights)}
    checkpoint = files.read(folders.folder_of(folder, 5))
    for tensors, expected in (
        (checkpoint.tensors, weights),
        (read_all(checkpoint.optimizer()), state),
    ):
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensors[key], tensor), key
    assert len(list(checkpoint.folder.glob("model-*.safetensors"))) <= mesh.size // mesh.data
