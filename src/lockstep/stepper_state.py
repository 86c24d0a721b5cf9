"""A Stepper's state as a checkpoint keeps it: tensors by name, everything else as JSON, and no number of ranks in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.identity import weights
from lockstep.checkpoints.pieces import METHOD, Piece, method_kept, method_pieces, shared_out, sizes
from lockstep.checkpoints.plain import decoded, encoded
from lockstep.errors import DamagedCheckpoint, UsageError
from lockstep.stepper import Stepper
from lockstep.updates.local_steps import LocalSteps


@dataclass(frozen=True, slots=True)
class Taken:
    """What this rank has to write."""

    model: dict[str, Tensor] | None
    """On rank 0."""
    pieces: list[Piece]
    state: dict[str, Any]


def take(stepper: Stepper) -> Taken:
    """The state as it is now. Tensors that all ranks have are shared out among them. Raises UsageError for what only pickle could keep."""
    group = stepper.everyone
    model = weights(stepper.model)
    if isinstance(stepper.update, LocalSteps):
        model = stepper.update.model(model)
    name_of = _names(stepper)
    everywhere, mine = stepper.update.pieces(name_of)
    common, own = method_pieces(stepper.keepers(), group.rank)
    groups = stepper.optimizer.param_groups
    state = {
        "steps": stepper.steps,
        "method": stepper.method.recipe(),
        "order of gradients": stepper.reducer.order,
        "optimizer": {
            "kind": _kind(stepper.optimizer),
            "groups": [
                {
                    "parameters": [name_of(each) for each in members],
                    "options": encoded({key: value for key, value in options.items() if key != "params"}, "the optimizer's group"),
                }
                for options, members in zip(groups, stepper.update.wholes(), strict=True)
            ],
            "numbers": _numbers(stepper, name_of),
        },
        "scheduler": None if stepper.scheduler is None else encoded(stepper.scheduler.state_dict(), "the scheduler's state"),
        "scaler": None if stepper.scaler is None else encoded(stepper.scaler.state_dict(), "the scaler's state"),
    }
    pieces = [*shared_out([*everywhere, *common], group.rank, group.size, sizes(model)), *mine, *own]
    return Taken(model if group.rank == 0 else None, pieces, state)


def restore(stepper: Stepper, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """Have `stepper` go on from `checkpoint`, whose `state` `take` has made. Every rank calls it alike.

    Raises UsageError, naming what differs, for another model's or optimizer's, before anything is changed.
    """
    theirs = checkpoint.tensors
    _compare(weights(stepper.model), theirs)
    optimizer, name_of = state["optimizer"], _names(stepper)
    if optimizer["kind"] != _kind(stepper.optimizer):
        raise UsageError(f"the checkpoint was made with {optimizer['kind']}, and the optimizer is {_kind(stepper.optimizer)}: use the same")
    method, before = stepper.method.recipe(), state.get("method", {})
    if method != before:
        raise UsageError(f"the checkpoint was made with {_said(before)}, and this training is with {_said(method)}: use the same")
    names = [[name_of(each) for each in members] for members in stepper.update.wholes()]
    saved = [each["parameters"] for each in optimizer["groups"]]
    if names != saved:
        raise UsageError(
            f"the checkpoint's optimizer has other parameter groups ({_shape(saved)} parameters) than this one ({_shape(names)})"
        )
    stepper.steps = int(state["steps"])
    stepper.part_if_due()
    stepper.reducer.lay(state["order of gradients"])
    stepper.follow_layout()
    ours = weights(stepper.model)  # only now: the layout may have moved them
    with torch.no_grad():
        for name, tensor in theirs.items():
            ours[name].copy_(tensor)
    tensors = dict(checkpoint.optimizer())
    stepper.load_optimizer_state_dict(_optimizer_state(checkpoint, tensors, optimizer))
    kept = method_kept({name.removeprefix(METHOD): tensor for name, tensor in tensors.items() if name.startswith(METHOD)})
    for part in stepper.keepers():
        part.take_back(*kept)
    for what, target in (("scheduler", stepper.scheduler), ("scaler", stepper.scaler)):
        if (target is None) != (state[what] is None):
            raise UsageError(f"the checkpoint was made {'without' if state[what] is None else 'with'} a {what}: use the same")
        if target is not None:
            target.load_state_dict(decoded(state[what]))
    stepper.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch: a scheduler that steps now is not too early


def _optimizer_state(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> dict[str, Any]:
    """In the form of torch's `Optimizer.state_dict`."""
    numbers: dict[str, int] = {}
    groups = []
    for group in saved["groups"]:
        members = range(len(numbers), len(numbers) + len(group["parameters"]))
        numbers |= zip(group["parameters"], members, strict=True)
        groups.append({**decoded(group["options"]), "params": list(members)})
    states: dict[int, dict[str, Any]] = {}
    for name, values in saved["numbers"].items():
        states.setdefault(numbers[name], {}).update(decoded(values))
    for key, tensor in tensors.items():
        if key.startswith(METHOD):
            continue
        state, _, name = key.partition("/")
        if name not in numbers:
            raise DamagedCheckpoint(f"{checkpoint.folder.name}: it holds {key}, of a parameter that its optimizer does not have", key)
        states.setdefault(numbers[name], {})[state] = tensor
    return {"state": states, "param_groups": groups}


def _numbers(stepper: Stepper, name_of: Callable[[Tensor], str]) -> dict[str, Any]:
    """What the optimizer keeps for whole parameters beside tensors."""
    found = {}
    for members in stepper.update.wholes():
        for each in members:
            plain = {key: value for key, value in stepper.optimizer.state.get(each, {}).items() if not isinstance(value, Tensor)}
            if plain:
                found[name_of(each)] = encoded(plain, "the optimizer's state")
    return found


def _names(stepper: Stepper) -> Callable[[Tensor], str]:
    """Names of the optimizer's parameters: the model's, or, where it has none, their place in the optimizer."""
    known = {id(parameter): name for name, parameter in stepper.model.named_parameters()}
    places = {id(each): f"#{number}" for number, each in enumerate(each for members in stepper.update.wholes() for each in members)}
    return lambda parameter: known.get(id(parameter)) or places[id(parameter)]


def _compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    if missing := sorted(ours.keys() ^ theirs.keys()):
        where = "the model lacks" if missing[0] in theirs else "the checkpoint lacks"
        raise UsageError(f"the checkpoint is another model's: {where} {missing[0]!r}")
    for name, tensor in ours.items():
        if (tensor.shape, tensor.dtype) != (theirs[name].shape, theirs[name].dtype):
            raise UsageError(
                f"the checkpoint is another model's: {name} is {list(theirs[name].shape)} {theirs[name].dtype} there, and "
                f"{list(tensor.shape)} {tensor.dtype} here"
            )


def _said(recipe: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in recipe.items()) or "every gradient summed as it is"


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _shape(groups: list[list[str]]) -> str:
    return ", ".join(str(len(members)) for members in groups)
