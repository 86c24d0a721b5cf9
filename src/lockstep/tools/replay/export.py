"""Write one micro-batch of a step, the weights before the step, and the gradients, with a script that
loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.data.windows import Window
from lockstep.errors import UsageError
from lockstep.runs import AssembledTraining
from lockstep.tools.timing.output_files import write_json

if TYPE_CHECKING:
    from lockstep.tools.replay.computed import ReplayedMicroBatch

_SCRIPT = '''"""Step {step}, slot {slot}: compute the gradient of the mean loss again, and compare it."""
import json, pathlib, torch, lockstep
from safetensors.torch import load_file
folder = pathlib.Path(__file__).parent
facts = json.loads((folder / "step.json").read_text())
task = lockstep.runs.load_task(lockstep.runs.Settings(**facts["settings"]))
model = task.model()
model.load_state_dict(load_file(folder / "weights.safetensors"), strict=False)
tensors = load_file(folder / "micro_batch.safetensors")
batch = {batch}
lockstep.seed(facts["seed"])
with lockstep.stream("step", facts["step"] - 1, facts["slot"]):
    inputs = task.inputs(batch)
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss, weight = task.loss(output, batch)
(loss / weight).backward()
print("loss", float(loss.detach() / weight), "recorded", facts["loss"])
saved = load_file(folder / "gradient.safetensors")
for name, parameter in model.named_parameters():
    if name in saved:
        print(name, "largest difference", float((parameter.grad - saved[name]).abs().max()))
'''


class StepFiles:
    """Collects what is written of one step, and writes it into `folder`.

    Args:
        folder: an empty folder.
        before: the model's tensors before the step.
    """

    def __init__(self, folder: Path, before: Mapping[str, Tensor]) -> None:
        self._folder = folder
        self._before = before
        self._facts: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}
        self._expression = ""
        self._gradients: Mapping[str, Tensor] = {}

    def add_micro_batch(
        self, micro_batch: ReplayedMicroBatch, batch: Any, gradients: Mapping[str, Tensor]
    ) -> None:
        """Take a micro-batch, and the gradient of its mean loss. Raises UsageError for a batch with
        objects that no file can hold.
        """
        self._expression = _expression(batch, "batch", self._tensors)
        self._gradients = gradients
        self._facts = {
            "slot": micro_batch.slot,
            "loss": micro_batch.loss,
            "weight": micro_batch.weight,
        }

    def write(
        self, training: AssembledTraining, window: Window, gradients: Mapping[str, Tensor]
    ) -> None:
        """Write all files, if this rank has the micro-batch. `gradients`: of the step, after the
        clip.
        """
        if not self._facts:
            return
        step = window.step + 1
        settings = training.settings
        self._facts |= {
            "step": step,
            "epoch": window.epoch + 1,
            "settings": {"task": settings.task, "overrides": dict(settings.overrides)},
            "seed": training.task.seed,
        }
        for name, tensors in {
            "micro_batch": self._tensors,
            "weights": self._before,
            "gradient": self._gradients,
            "step_gradient": gradients,
        }.items():
            stored = {key: _storable(tensor) for key, tensor in tensors.items()}
            save_file(stored, self._folder / f"{name}.safetensors")
        write_json(self._folder / "step.json", self._facts)
        script = _SCRIPT.format(step=step, slot=self._facts["slot"], batch=self._expression)
        (self._folder / "load.py").write_text(script, encoding="utf-8")


def _storable(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense().cpu().resolve_conj().contiguous().clone()


def _expression(value: Any, path: str, tensors: dict[str, Tensor]) -> str:
    """Return the Python expression that makes `value` of `tensors`, and add its tensors there."""
    if isinstance(value, (Tensor, np.ndarray)):
        tensors[path] = value if isinstance(value, Tensor) else torch.from_numpy(value)
        return f'tensors["{path}"]{"" if isinstance(value, Tensor) else ".numpy()"}'
    if isinstance(value, Mapping):
        parts = []
        for key, part in value.items():
            parts.append(f"{key!r}: {_expression(part, f'{path}.{key}', tensors)}")
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, (list, tuple)):
        parts = []
        for number, part in enumerate(value):
            parts.append(_expression(part, f"{path}.{number}", tensors))
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)},)"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise UsageError("batch-not-storable", kind=type(value).__name__, part=path)
