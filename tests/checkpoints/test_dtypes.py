"""Whatever dtype a buffer has, it trains, is saved and comes back; or it is refused before
training, by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import lockstep
from lockstep.checkpoints import files
from lockstep.checkpoints.pieces import TensorFile, image, read_all, stored, write
from lockstep.checks.identity import sha256, weights
from lockstep.errors import TaskError, UsageError
from lockstep.gradients.saved_state import TensorPiece
from lockstep.training.train import train
from tests.refused import refused
from tests.teams import on_team
from tests.training import toy

UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
INTEGERS = [*UNSIGNED, torch.int8, torch.int16, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float64]
OTHERS = [torch.bool, *FLOATS, torch.complex64, torch.complex128]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


class Net(toy.Net):
    """With a buffer that stays and one that moves, of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (*INTEGERS, *OTHERS, *EIGHT_BITS):
            self.register_buffer(f"stays_{str(dtype)[6:]}", torch.tensor([1, 0, 1]).to(dtype))
        for dtype in (torch.uint16, torch.complex128, torch.float8_e5m2):
            self.register_buffer(f"moves_{str(dtype)[6:]}", torch.zeros(2).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for name, buffer in self.named_buffers():
                if name.startswith("moves"):
                    wide = torch.complex128 if buffer.is_complex() else torch.float32
                    buffer.copy_((buffer.to(wide) + 1).to(buffer.dtype))
        return super().forward(x)


def on_rank(world: lockstep.World, run: str) -> str:
    result = train(toy.task(model=Net), run=run, steps=3, checkpoint_every=2, world=world)
    for name in ("moves_uint16", "moves_complex128", "moves_float8_e5m2"):
        assert result.model.get_buffer(name).to(torch.complex64).tolist() == [3, 3]
    return result.sha256


def test_every_dtype_is_trained_saved_and_read_back(tmp_path: Path) -> None:
    first, second = on_team(on_rank, 2, args=(str(tmp_path / "run"),))
    assert first == second
    found = files.read(tmp_path / "run" / "checkpoints" / "step-0000003").tensors
    assert sha256(found) == first
    for name, tensor in weights(Net()).items():
        assert found[name].dtype == tensor.dtype
        assert not name.startswith("stays") or torch.equal(
            found[name].view(torch.uint8), tensor.view(torch.uint8)
        )


def every_form() -> dict[str, Tensor]:
    """Of each dtype that safetensors has: of some dimensions, of none, empty, not contiguous."""
    found = {}
    for number, dtype in enumerate((*INTEGERS, *OTHERS[:-1], *EIGHT_BITS)):
        whole = (torch.arange(6) + number).view(2, 3).to(dtype)
        forms = {"whole": whole, "none": whole[0, 1], "empty": whole[:0], "turned": whole.t()}
        found |= {f"{str(dtype)[6:]}/{form}": tensor for form, tensor in forms.items()}
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        read = found[name]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(octets(read), octets(tensor)), name


def octets(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_the_safetensors_library_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    expected, file = every_form(), tmp_path / "model.safetensors"
    pieces = [TensorPiece(name, tensor) for name, tensor in expected.items()]
    write(file, image(TensorFile(file.name, pieces)))
    same(load_file(file), expected)
    same(read_all(stored([file])), expected)
    # what the library writes with our notes in the header
    plain = {name: tensor.clone().contiguous() for name, tensor in expected.items()}
    as_real = {"wide": torch.ones(3, 2, dtype=torch.float64)}
    tied = {"again": torch.ones(3)}
    notes = {"complex": json.dumps(["wide"]), "tied": json.dumps({"again": "int8/whole"})}
    save_file({**plain, **as_real, **tied}, file, metadata=notes)
    wide = {"wide": torch.complex(torch.ones(3), torch.ones(3)).to(torch.complex128)}
    same(read_all(stored([file])), {**expected, **wide})


def test_intervals_of_complex_tensors_are_put_together(tmp_path: Path) -> None:
    whole = torch.complex(torch.arange(6.0), -torch.arange(6.0)).to(torch.complex128)
    parts = [
        TensorPiece("exp_avg/w", whole[start : start + 3].clone(), start, (2, 3), (3, 1))
        for start in (0, 3)
    ]
    for number, part in enumerate(parts):
        write(tmp_path / f"{number}.safetensors", image(TensorFile("", [part])))
    found = stored([tmp_path / "0.safetensors", tmp_path / "1.safetensors"])["exp_avg/w"].read()
    assert found.dtype == torch.complex128
    assert torch.equal(found, whole.view(2, 3))


def of(buffer: Tensor) -> Any:
    class Odd(toy.Net):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.register_buffer("odd", buffer)

    return Odd


@pytest.mark.parametrize(
    ("buffer", "what", "own_loop"),
    [
        (torch.eye(2).to_sparse(), "in layout torch.sparse_coo", "is a sparse tensor"),
        (torch.zeros(2, dtype=torch.bits8), "of dtype torch.bits8", "is of dtype torch.bits8"),
    ],
    ids=["sparse", "bits"],
)
def test_what_cannot_be_saved_is_refused_before_training(
    tmp_path: Path, buffer: Tensor, what: str, own_loop: str
) -> None:
    steps: list[Any] = []
    with refused("tensor-not-storable", TaskError, tensor="buffer inner.odd", what=what):
        train(toy.task(model=of(buffer), on_step=steps.append), run=tmp_path / "run")
    assert not steps
    assert not (tmp_path / "run").exists()
    with lockstep.init() as world:
        model = of(buffer)()
        with pytest.raises(UsageError, match=own_loop):
            lockstep.Checkpoints(tmp_path, lockstep.Stepper(model, toy.sgd(model), world=world))


class Packed(torch.optim.SGD):
    """With state of a dtype that no file has, for one parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        bias = self.param_groups[0]["params"][-1]
        self.state[bias]["packed"] = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)


def saved_packed(world: lockstep.World, folder: str) -> int:
    model = toy.Net()
    stepper = lockstep.Stepper(model, Packed(model.parameters(), lr=0.1), world=world)
    checkpoints = lockstep.Checkpoints(folder, stepper)
    for _ in range(2):
        for x in stepper.micro_batches([torch.randn(4, 6)]):
            stepper.backward(model(x).sum(), weight=4)
        stepper.step()
        with refused("tensor-not-storable", what="of dtype torch.bits8") as caught:
            checkpoints.save()
        assert caught.value.values["tensor"].startswith("optimizer state packed/")
    try:
        checkpoints.save()
    except UsageError:
        checkpoints.close()  # while an exception is handled, it saves nothing
    return stepper.steps


def test_optimizer_state_that_cannot_be_saved_is_named_on_all_ranks(tmp_path: Path) -> None:
    """Also where one rank alone would write it; and all go on together."""
    assert on_team(saved_packed, 2, args=(str(tmp_path),)) == [2, 2]
    assert not list(tmp_path.glob("step-*"))
