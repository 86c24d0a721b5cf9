"""A Stepper's state as a checkpoint keeps it: tensors by name, everything else as JSON, and no number of ranks in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.checkpoints.files import Checkpoint
from lockstep.checkpoints.identity import under_all_names, weights
from lockstep.checkpoints.pieces import METHOD, Piece, method_kept, method_pieces, shared_out, sizes
from lockstep.checkpoints.plain import decoded, encoded
from lockstep.errors import DamagedCheckpoint, UsageError
from lockstep.stepper import Stepper


@dataclass(frozen=True, slots=True)
class Taken:
    """What this rank has to write."""

    model: Mapping[str, Tensor] | Sequence[Piece] | None
    """On rank 0; of a split model, what each rank writes."""
    pieces: list[Piece]
    state: dict[str, Any]


Forms = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Form(Protocol):
    """How a model's and its optimizer's tensors lie on the ranks: whole on each (`Whole`), or split (model_parallel/kept.py). Names are the whole model's."""

    def pieces(self, name_of: Callable[[Tensor], str]) -> tuple[Mapping[str, Tensor] | Sequence[Piece] | None, list[Piece]]:
        """What this rank writes of the model, and of everything else."""
        ...

    def groups(self, mine: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        """The names in the optimizer's groups, over all ranks that hold one model."""
        ...

    def numbers(self, mine: dict[str, Any]) -> dict[str, Any]:
        """What the optimizer keeps beside tensors, over the same."""
        ...

    def compare(self, checkpoint: Checkpoint) -> None:
        """Raise a UsageError where the checkpoint is another model's."""
        ...

    def load(self, checkpoint: Checkpoint) -> None:
        """Take what is here of the model of a checkpoint that was compared."""
        ...

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What is here of the optimizer's tensors, "state/parameter" by name."""
        ...


def _form(stepper: Stepper) -> Form:
    return Whole(stepper) if stepper.held is None else stepper.held.form(stepper)


class Whole:
    """Every rank has everything, but for the optimizer's state where the update is sharded."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def pieces(self, name_of: Callable[[Tensor], str]) -> tuple[Mapping[str, Tensor] | None, list[Piece]]:
        stepper, group = self._stepper, self._stepper.everyone
        model = under_all_names(stepper.update.model(weights(stepper.model)), stepper.model)
        everywhere, mine = stepper.update.pieces(name_of)
        common, own = method_pieces(stepper.keepers(), group.rank)
        pieces = [*shared_out([*everywhere, *common], group.rank, group.size, sizes(model)), *mine, *own]
        return model if group.rank == 0 else None, pieces

    def groups(self, mine: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        return mine

    def numbers(self, mine: dict[str, Any]) -> dict[str, Any]:
        return mine

    def compare(self, checkpoint: Checkpoint) -> None:
        self._theirs = checkpoint.tensors
        compare_forms(forms_of(weights(self._stepper.model).items()), forms_of(self._theirs.items()))

    def load(self, checkpoint: Checkpoint) -> None:
        ours = weights(self._stepper.model)
        with torch.no_grad():
            for name, tensor in self._theirs.items():
                ours[name].copy_(tensor)

    def optimizer(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        return dict(checkpoint.optimizer())


def take(stepper: Stepper) -> Taken:
    """The state as it is now. Tensors that all ranks have are shared out among them. Raises UsageError for what only pickle could keep."""
    name_of, form = _names(stepper), _form(stepper)
    model, pieces = form.pieces(name_of)
    names = form.groups([[name_of(each) for each in members] for members in stepper.update.wholes()])
    state = {
        "steps": stepper.steps,
        "method": stepper.method.recipe(),
        "order of gradients": stepper.reducer.order,
        "split": stepper.held is not None,
        "optimizer": {
            "kind": _kind(stepper.optimizer),
            "groups": [
                {
                    "parameters": list(members),
                    "options": encoded({key: value for key, value in options.items() if key != "params"}, "the optimizer's group"),
                }
                for options, members in zip(stepper.optimizer.param_groups, names, strict=True)
            ],
            "numbers": form.numbers(_numbers(stepper, name_of)),
        },
        "scheduler": None if stepper.scheduler is None else encoded(stepper.scheduler.state_dict(), "the scheduler's state"),
        "scaler": None if stepper.scaler is None else encoded(stepper.scaler.state_dict(), "the scaler's state"),
    }
    return Taken(model, pieces, state)


def restore(stepper: Stepper, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
    """Have `stepper` go on from `checkpoint`, whose `state` `take` has made. Every rank calls it alike.

    Raises UsageError, naming what differs, for another model's or optimizer's, before anything is changed.
    """
    optimizer, name_of, form = state["optimizer"], _names(stepper), _form(stepper)
    form.compare(checkpoint)
    if optimizer["kind"] != _kind(stepper.optimizer):
        raise UsageError(f"the checkpoint was made with {optimizer['kind']}, and the optimizer is {_kind(stepper.optimizer)}: use the same")
    method, before = stepper.method.recipe(), state.get("method", {})
    if method != before:
        raise UsageError(f"the checkpoint was made with {_said(before)}, and this training is with {_said(method)}: use the same")
    names = [[name_of(each) for each in members] for members in stepper.update.wholes()]
    everyones = [list(members) for members in form.groups(names)]
    saved = [each["parameters"] for each in optimizer["groups"]]
    if [sorted(members) for members in everyones] != [sorted(members) for members in saved]:
        raise UsageError(
            f"the checkpoint's optimizer has other parameter groups ({_shape(saved)} parameters) than this one ({_shape(everyones)})"
        )
    stepper.steps = int(state["steps"])
    stepper.part_if_due()
    split = stepper.held is not None or state.get("split", False)
    if not split or set(state["order of gradients"]) == set(stepper.reducer.order):  # else it was split in another way
        stepper.reducer.lay(state["order of gradients"])
    stepper.follow_layout()
    form.load(checkpoint)  # only now: the layout may have moved the weights
    tensors = form.optimizer(checkpoint)
    stepper.load_optimizer_state_dict(_optimizer_state(checkpoint, tensors, optimizer, names))
    kept = method_kept({name.removeprefix(METHOD): tensor for name, tensor in tensors.items() if name.startswith(METHOD)})
    for part in stepper.keepers():
        part.take_back(*kept)
    for what, target in (("scheduler", stepper.scheduler), ("scaler", stepper.scaler)):
        if (target is None) != (state[what] is None):
            raise UsageError(f"the checkpoint was made {'without' if state[what] is None else 'with'} a {what}: use the same")
        if target is not None:
            target.load_state_dict(decoded(state[what]))
    stepper.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch: a scheduler that steps now is not too early


def _optimizer_state(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], saved: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """In the form of torch's `Optimizer.state_dict`, for an optimizer whose groups hold `names`."""
    numbers: dict[str, int] = {}
    groups = []
    for group, mine in zip(saved["groups"], names, strict=True):
        members = range(len(numbers), len(numbers) + len(mine))
        numbers |= zip(mine, members, strict=True)
        groups.append({**decoded(group["options"]), "params": list(members)})
    known = {name for group in saved["groups"] for name in group["parameters"]}
    states: dict[int, dict[str, Any]] = {}
    for name, values in saved["numbers"].items():
        if name in numbers:
            states.setdefault(numbers[name], {}).update(decoded(values))
    for key, tensor in tensors.items():
        if key.startswith(METHOD):
            continue
        state, _, name = key.partition("/")
        if name not in known:
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
    """Names of the optimizer's parameters: the whole model's, or, where it has none, their place in the optimizer."""
    known = {id(parameter): name for name, parameter in stepper.model.named_parameters()}
    if stepper.held is not None:
        known = {key: stepper.held.optimizer_name(name) for key, name in known.items()}
    places = {id(each): f"#{number}" for number, each in enumerate(each for members in stepper.update.wholes() for each in members)}
    return lambda parameter: known.get(id(parameter)) or places[id(parameter)]


def forms_of(tensors: Iterable[tuple[str, Tensor]]) -> Forms:
    """The shape and dtype of each, by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors}


def compare_forms(ours: Forms, theirs: Forms) -> None:
    """Raise a UsageError where a checkpoint's model has other names, shapes or dtypes."""
    if missing := sorted(ours.keys() ^ theirs.keys()):
        where = "the model lacks" if missing[0] in theirs else "the checkpoint lacks"
        raise UsageError(f"the checkpoint is another model's: {where} {missing[0]!r}")
    for name, form in ours.items():
        if form != theirs[name]:
            raise UsageError(
                f"the checkpoint is another model's: {name} is {list(theirs[name][0])} {theirs[name][1]} there, and {list(form[0])} {form[1]} here"
            )


def _said(recipe: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in recipe.items()) or "every gradient summed as it is"


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _shape(groups: list[list[str]]) -> str:
    return ", ".join(str(len(members)) for members in groups)
