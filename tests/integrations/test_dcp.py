"""torch.distributed.checkpoint on Lockstep's checkpoints: read by plain and sharded models at
several world sizes, written without pickle, and exported for torch's own reader.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import lockstep
from lockstep.checkpoints import files
from lockstep.cli.checkpoints import app
from lockstep.errors import DamagedCheckpoint
from lockstep.integrations.dcp import LockstepReader, LockstepWriter
from lockstep.world.world import World
from tests.checkpoints.model_alone import write_model
from tests.refused import refused
from tests.step.walking import same
from tests.teams import on_team

State = dict[str, Any]
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """With a tied weight, a buffer, a scalar, and rows that 2 and 3 ranks share unevenly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.words(x)) * self.gain)


def made(seed: int, *, shard: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = Net(seed)
    if shard:
        fully_shard(model)
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others}]
    return model, torch.optim.AdamW(groups, lr=seed / 100)


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None
) -> State:
    weights, states = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": states}


def whole(value: Any) -> Any:
    """A state with copies of whole, plain tensors. Every rank calls it."""
    if isinstance(value, dict):
        return {name: whole(each) for name, each in value.items()}
    if isinstance(value, Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return [whole(each) for each in value] if isinstance(value, list) else value


def load(state: State, reader: dcp.StorageReader) -> State:
    with warnings.catch_warnings(action="ignore"):  # of one process
        dcp.load(state, storage_reader=reader)
    return state


def loaded(path: Path, *, shard: bool = False) -> State:
    """The state of another model and optimizer that have taken over what lies there."""
    model, optimizer = made(7, shard=shard)
    state = load(state_of(model, optimizer), LockstepReader(path))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return whole(state_of(model, optimizer))


def columns(world: World) -> DTensor:
    """Divided along its second dim."""
    mesh = init_device_mesh("cpu", (world.size,))
    return distribute_tensor(torch.arange(35.0).view(5, 7), mesh, [Shard(1)])


def trains_and_saves(world: World, folder: Path) -> State:
    """With a sharded update, so that no rank has the whole optimizer. Then DCP loads it into a
    sharded model, and saves that.
    """
    model, optimizer = made(3)
    words = torch.randint(11, (48,), generator=torch.Generator().manual_seed(1))
    stepper = lockstep.Stepper(model, optimizer, update="sharded")
    loader = lockstep.Loader(TensorDataset(words, words.flip(0)), global_batch=16, micro_batch=4)
    checkpoints = lockstep.Checkpoints(folder / "run" / "checkpoints", stepper, loader, every=2)
    for window in next(iter(loader.epochs(1))):
        for x, y in stepper.micro_batches(window):
            stepper.backward(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))
        stepper.step()
        checkpoints.step()
    checkpoints.close()
    reference, plain = made(5)
    plain.load_state_dict(stepper.optimizer_state_dict())
    reference.load_state_dict(model.state_dict())
    expected = whole(state_of(reference, plain))
    sharded, its = made(7, shard=True)
    state = load(state_of(sharded, its), LockstepReader(folder / "run"))
    assert any(isinstance(each, DTensor) for each in state["model"].values())
    set_state_dict(
        sharded, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    state = state_of(sharded, its)
    more = {"columns": columns(world), "epoch": 4, "seen": torch.tensor(48), "at": {"rate": (1, 2)}}
    dcp.save({**state, **more}, storage_writer=LockstepWriter(folder / "step-0000003"))
    return expected


def loads(world: World, folder: Path) -> list[State]:
    """What Lockstep and what DCP wrote, into plain and sharded models."""
    found = [
        loaded(path, shard=shard)
        for path in (folder / "run", folder / "step-0000003")
        for shard in (False, True)
    ]
    more = {
        "columns": distribute_tensor(
            torch.zeros(5, 7), init_device_mesh("cpu", (world.size,)), [Shard(0)]
        ),
        "epoch": 0,
        "seen": torch.tensor(0),
        "at": {"rate": (0, 0)},
    }
    load(more, LockstepReader(folder / "step-0000003"))
    assert same(whole(more)["columns"], torch.arange(35.0).view(5, 7))
    assert (more["epoch"], more["seen"].item(), more["at"]) == (4, 48, {"rate": (1, 2)})
    return found


def test_states_come_back_at_other_world_sizes_and_in_other_formats(tmp_path: Path) -> None:
    expected, second = on_team(trains_and_saves, 2, (tmp_path,))
    assert same(second, expected)
    assert expected["optimizer"]["state"]["words.weight"]["step"] == 3
    for rank in on_team(loads, 3, (tmp_path,)):
        assert same(rank, [expected] * 4)
    assert same(loaded(tmp_path / "run"), expected)
    flat = state_of(*made(7), BY_NAME)
    rate = "param_groups.gain.lr"
    assert flat["optimizer"][rate] == 0.07
    assert load(flat, LockstepReader(tmp_path / "run"))["optimizer"][rate] == 0.03
    assert same(loaded(tmp_path / "step-0000003"), expected)
    called = CliRunner().invoke(app, ["verify", str(tmp_path / "step-0000003")])
    assert (called.exit_code, called.stdout.split()[:2]) == (0, ["whole:", "step-0000003"])
    for source in ("run", "step-0000003"):
        out = tmp_path / f"dcp of {source}"
        called = CliRunner().invoke(
            app, ["export", str(tmp_path / source), "--format", "dcp", "--out", str(out)]
        )
        assert called.exit_code == 0, called.output
        model, optimizer = made(7)
        assert same(whole(load(state_of(model, optimizer), dcp.FileSystemReader(out))), expected)


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2)}
    return write_model(tmp_path / "run" / "checkpoints", 4, tensors, {})


def save(state: State, writer: dcp.StorageWriter, **options: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # of one process
        dcp.save(state, storage_writer=writer, **options)


def raised(call: Callable[[], object]) -> BaseException:
    """What rank 0 raised, which DCP has wrapped."""
    with pytest.raises(dcp.CheckpointException) as caught:
        call()
    error: BaseException = caught.value.failures[0][0]
    return error


def test_a_damaged_checkpoint_is_not_loaded(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    octets = bytearray(file.read_bytes())
    octets[-1] ^= 1
    file.write_bytes(octets)
    state = {"model": {"a": torch.zeros(6)}}
    with refused("checkpoint-file-changed", DamagedCheckpoint, file="model.safetensors"):
        raise raised(lambda: load(state, LockstepReader(checkpoint)))
    assert not state["model"]["a"].any()
    (checkpoint / "manifest.json").write_text("{}")
    with refused("checkpoint-file-changed", DamagedCheckpoint, file="manifest.json"):
        LockstepReader(checkpoint)


def test_what_is_no_checkpoint_of_a_training_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with refused("no-checkpoint", run=folder):
            LockstepReader(folder)
    for number, state in enumerate(({"training": {"optimizer": 3}}, {"dcp": {"!": "code"}})):
        folder = write_model(tmp_path, number, {"a": torch.ones(1)}, state)
        with refused("checkpoint-file-unreadable", DamagedCheckpoint, file="state.json"):
            LockstepReader(folder)


def test_keys_are_the_users(checkpoint: Path) -> None:
    bare = load({"a": torch.zeros(6)}, LockstepReader(checkpoint, model=""))
    deep = load(
        {"app": {"net": {"a": torch.zeros(6)}}}, LockstepReader(checkpoint, model="app.net")
    )
    assert same([bare["a"], deep["app"]["net"]["a"]], [torch.arange(6.0)] * 2)


def test_ranks_that_found_different_checkpoints_do_not_load(checkpoint: Path) -> None:
    run = checkpoint.parents[1]
    early = LockstepReader(run)
    plans = [early.prepare_local_plan(dcp.LoadPlan([]))]
    write_model(checkpoint.parent, 9, {"a": torch.ones(1)}, {})
    plans.append(LockstepReader(run).prepare_local_plan(dcp.LoadPlan([])))
    names = ["step-0000004", "step-0000009"]
    with refused("ranks-read-other-checkpoints", checkpoints=names):
        early.prepare_global_plan(plans)


def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(tmp_path: Path) -> None:
    place = tmp_path / "last"
    first, second = ({"model": {"a": torch.full((3,), float(each))}} for each in (1, 2))
    save(first, LockstepWriter(place))
    with refused("value-not-storable", what="rank"):
        raise raised(lambda: save({**second, "rank": object()}, LockstepWriter(place)))
    assert load({"model": {"a": torch.zeros(3)}}, LockstepReader(place))["model"]["a"][0] == 1
    save(second, LockstepWriter(place))  # also over what the failed one left
    assert files.read(place).tensors["a"][0] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_what_the_writer_cannot_write_is_refused(tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(2)}}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with refused("cannot-write", file=tmp_path / "mine"):
        raise raised(lambda: save(state, LockstepWriter(tmp_path / "mine")))
    with refused("state-without-model", prefix="net.", keys=["model.a"]):
        raise raised(lambda: save(state, LockstepWriter(tmp_path / "new", model="net")))
    with refused("dcp-cannot-save", what="with use_collectives=False"):
        save(state, LockstepWriter(tmp_path / "new"), use_collectives=False)
    item = WriteItem(
        MetadataIndex("model.a", (0, 0)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            dcp.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, 1))),
            TensorProperties(),
            torch.Size((2, 2)),
        ),
    )
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"model.a": torch.ones(1, 1)})
    with refused("dcp-cannot-save", what="model.a, divided along dims [0, 1]"):
        LockstepWriter(tmp_path / "new").write_data(dcp.SavePlan([item]), planner)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
