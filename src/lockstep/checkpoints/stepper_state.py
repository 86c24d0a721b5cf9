"""A Stepper's state in a checkpoint: tensors by name, all other values as JSON. The state does not
depend on the number of ranks.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoints import files
from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.form import CheckpointForm, compare_forms, copy_stored, forms_of
from lockstep.checkpoints.pieces import METHOD, StoredTensor, TensorFile, storable
from lockstep.checks.identity import under_all_names, weights
from lockstep.collectives.broadcast_json import everybodys
from lockstep.collectives.group import Group
from lockstep.collectives.plain_json import decoded, encoded
from lockstep.errors import DamagedCheckpoint, UsageError
from lockstep.gradients.saved_state import TensorPiece
from lockstep.step.step_result import allow_scheduler
from lockstep.step.stepper import Stepper


def snapshot(
    stepper: Stepper, scheduler: LRScheduler | None
) -> tuple[list[TensorFile], dict[str, Any]]:
    """Return the current state: the files that this rank writes, and what is not in tensors. It
    includes that of a `scheduler` which the Stepper does not step. Tensors that all ranks hold are
    divided among the ranks. Every rank calls it.

    Raises UsageError for values that only pickle could store, on all ranks for a tensor.
    """
    name_of = _names(stepper)
    form = _form(stepper)
    model, pieces = form.pieces(name_of)
    groups = []
    for options, members in zip(
        stepper.optimizer.param_groups, form.groups(_group_names(stepper, name_of)), strict=True
    ):
        plain = {key: value for key, value in options.items() if key != "params"}
        groups.append(
            {"parameters": list(members), "options": encoded(plain, "the optimizer's group")}
        )
    state: dict[str, Any] = {
        "steps": stepper.steps,
        "method": stepper.method.recipe(),
        "order of gradients": stepper.reducer.order,
        "averaged": None if stepper.average is None else int(stepper.average.n_averaged),
        "split": stepper.model_shard.mesh is not None,
        "optimizer": {
            "kind": _kind(stepper.optimizer),
            "groups": groups,
            "numbers": form.numbers(_numbers(stepper, name_of)),
        },
    }
    for name, part in _followers(stepper, scheduler):
        state[name] = None
        if part is not None:
            state[name] = encoded(part.state_dict(), f"the {name}'s state")
    _check_storable(pieces, stepper.world.control)
    return files.parts(model, pieces, stepper.world.rank, _average(stepper)), state


def _check_storable(pieces: Sequence[TensorPiece], group: Group) -> None:
    """Raise a UsageError on all ranks if any rank has optimizer state that no file can hold."""
    examples = {piece.data.dtype: piece.name for piece in pieces}
    unstorable = [[name, str(dtype)] for dtype, name in examples.items() if not storable(dtype)]
    by_rank = everybodys(unstorable, group, "for what a checkpoint can hold")
    for name, dtype in next(filter(None, by_rank), []):
        raise UsageError(
            "tensor-not-storable",
            tensor=f"optimizer state {name}",
            what=f"of dtype {dtype}",
            instead="use an optimizer that keeps another dtype",
        )


def _form(stepper: Stepper) -> CheckpointForm:
    return stepper.model_shard.form(stepper) or CheckpointForm(stepper)


def _average(stepper: Stepper) -> Mapping[str, Tensor] | None:
    """Return the averaged model on the last rank, which writes it. Return None on other ranks, or
    if nothing was averaged yet.
    """
    average = stepper.average
    world = stepper.world
    if average is None or average.n_averaged == 0 or world.rank != world.size - 1:
        return None
    return under_all_names(weights(average.module), average.module)


def restore(
    stepper: Stepper,
    checkpoint: Checkpoint,
    state: Mapping[str, Any],
    scheduler: LRScheduler | None,
) -> None:
    """Load `checkpoint` into `stepper` and `scheduler`. `state` was made by `snapshot`. Every rank
    calls it.

    Raises UsageError, naming the difference, if the checkpoint belongs to another model or
    optimizer. It does so before anything is changed.
    """
    optimizer = state["optimizer"]
    name_of = _names(stepper)
    form = _form(stepper)
    form.compare(checkpoint)
    average = _stored_average(stepper, checkpoint, state)
    if optimizer["kind"] != _kind(stepper.optimizer):
        raise _another(optimizer["kind"], _kind(stepper.optimizer))
    method = stepper.method.recipe()
    saved_method = state.get("method", {})
    if method != saved_method:
        raise _another(_method_text(saved_method), _method_text(method))
    # layers may have been frozen, unfrozen or added since the Stepper was made
    stepper.reducer.renew()
    stepper.update.follow()
    names = _group_names(stepper, name_of)
    groups = form.groups(names)
    saved_groups = [group["parameters"] for group in optimizer["groups"]]
    if list(map(sorted, groups)) != list(map(sorted, saved_groups)):
        raise _another(
            f"parameter groups of {_shape(saved_groups)} parameters", f"groups of {_shape(groups)}"
        )
    stepper.steps = int(state["steps"])
    stepper.part_if_due()
    _follow_order(stepper, state)
    stepper.update.follow()
    form.load(checkpoint)  # after the layout, which may move the weights
    if stepper.average is not None:
        copy_stored(average, stepper.average.module)
        stepper.average.n_averaged.fill_(int(state.get("averaged") or 0))
    tensors = form.optimizer(checkpoint)
    stepper.load_optimizer_state_dict(_optimizer_state(checkpoint, tensors, optimizer, names))
    of_method = {
        name.removeprefix(METHOD): tensor
        for name, tensor in tensors.items()
        if name.startswith(METHOD)
    }
    method_state = _method_state(of_method, checkpoint)
    for part in stepper.keepers():
        part.take_back(*method_state)
    for name, target in _followers(stepper, scheduler):
        stored = state.get(name)
        if target is None and stored is not None:
            raise _another(f"a {name}", f"no {name}")
        if target is not None:
            if stored is None:
                raise _another(f"no {name}", f"a {name}")
            target.load_state_dict(decoded(stored))
    allow_scheduler(stepper.optimizer)


def _method_state(
    tensors: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Divide the tensors under METHOD of a checkpoint: what was common, and what each rank had.

    Raises DamagedCheckpoint for the number of a rank that is not below the number of files: every
    rank that had something wrote a file.
    """
    common = {}
    by_rank: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"rank-(\d+)/(.*)", name, re.DOTALL)
        if match is None:
            common[name] = tensor
            continue
        digits, key = match.groups()
        if len(digits) > 9 or int(digits) >= len(checkpoint.entries):
            raise DamagedCheckpoint(
                "state-of-unknown-owner", checkpoint=checkpoint.folder.name, file=METHOD + name
            )
        by_rank.setdefault(int(digits), {})[key] = tensor
    ranks = max(by_rank, default=-1) + 1
    return common, [by_rank.get(rank, {}) for rank in range(ranks)]


def _stored_average(
    stepper: Stepper, checkpoint: Checkpoint, state: Mapping[str, Any]
) -> Mapping[str, StoredTensor]:
    """Return the average in a checkpoint; empty if nothing was averaged yet. Raises UsageError if
    only one of Stepper and checkpoint has an average, or if it belongs to another model.
    """
    average = stepper.average
    count = state.get("averaged")  # older checkpoints lack it
    if average is None and count is not None:
        raise _another("an average", "no average")
    if average is not None and count is None:
        raise _another("no average", "an average")
    if average is None or not count:
        return {}
    stored = checkpoint.average()
    compare_forms(forms_of(weights(average.module).items()), forms_of(stored.items()))
    return stored


def _another(there: str, here: str) -> UsageError:
    return UsageError(
        "another-training",
        place="the checkpoint",
        differences=f"it has {there}, and this training has {here}",
    )


def _followers(stepper: Stepper, scheduler: LRScheduler | None) -> list[tuple[str, Any]]:
    """Return the schedulers and the scaler with their names; None for one that does not exist."""
    return [
        ("scheduler", stepper.scheduler),
        ("scheduler of the loop", scheduler),
        ("scaler", stepper.scaler),
    ]


def _optimizer_state(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    names: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """Return a state in the form of torch's `Optimizer.state_dict`, for groups of `names`."""
    numbers: dict[str, int] = {}
    groups = []
    known: set[str] = set()
    for group, local in zip(saved["groups"], names, strict=True):
        members = range(len(numbers), len(numbers) + len(local))
        numbers |= zip(local, members, strict=True)
        groups.append({**decoded(group["options"]), "params": list(members)})
        known.update(group["parameters"])
    states: dict[int, dict[str, Any]] = {}
    for name, values in saved["numbers"].items():
        if name in numbers:
            states.setdefault(numbers[name], {}).update(decoded(values))
    for key, tensor in tensors.items():
        if key.startswith(METHOD):
            continue
        state, _, name = key.partition("/")
        if name not in known:
            raise DamagedCheckpoint(
                "state-of-unknown-owner", checkpoint=checkpoint.folder.name, file=key
            )
        states.setdefault(numbers[name], {})[state] = tensor
    return {"state": states, "param_groups": groups}


def _numbers(stepper: Stepper, name_of: Callable[[Tensor], str]) -> dict[str, Any]:
    """Return the optimizer's state that is not in tensors, by the names of whole parameters."""
    numbers = {}
    for parameter in itertools.chain.from_iterable(stepper.update.optimizer.wholes()):
        state = stepper.optimizer.state.get(parameter, {})
        plain = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if plain:
            numbers[name_of(parameter)] = encoded(plain, "the optimizer's state")
    return numbers


def _follow_order(stepper: Stepper, state: Mapping[str, Any]) -> None:
    """Lay out the buckets as the process did that wrote `state`: with some backends the position in
    a bucket decides the order of addition.
    """
    order = state["order of gradients"]
    differing = sorted(set(order) ^ set(stepper.reducer.order))
    split = stepper.model_shard.mesh is not None or state.get("split", False)
    if not differing:
        stepper.reducer.lay(order)
    elif not split:  # a model that was split in another way has another order
        raise UsageError(
            "checkpoint-of-another-model",
            checkpoint="the checkpoint",
            task="this training",
            differences=f"{differing} have no place in the order of gradients",
        )


def _names(stepper: Stepper) -> Callable[[Tensor], str]:
    """Return a function that gives a parameter's name in the whole model. A parameter of the
    optimizer only is named by its index there, such as "#3".
    """
    known = {
        id(parameter): stepper.model_shard.optimizer_name(name)
        for name, parameter in stepper.model.named_parameters()
    }
    parameters = itertools.chain.from_iterable(stepper.update.optimizer.wholes())
    numbered = {id(parameter): f"#{number}" for number, parameter in enumerate(parameters)}
    return lambda parameter: known.get(id(parameter)) or numbered[id(parameter)]


def _group_names(stepper: Stepper, name_of: Callable[[Tensor], str]) -> list[list[str]]:
    """Return the names of the parameters of each optimizer group, on this rank."""
    return [list(map(name_of, members)) for members in stepper.update.optimizer.wholes()]


def _method_text(recipe: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{name}={value}" for name, value in recipe.items())
        or "every gradient summed as it is"
    )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _shape(groups: Sequence[Sequence[str]]) -> str:
    return ", ".join(str(len(members)) for members in groups)
