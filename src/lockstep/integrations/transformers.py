"""Hugging Face's Trainer on Lockstep: `lockstep run --workers 2 train.py`.

    from lockstep.integrations.transformers import LockstepTrainer

    arguments = TrainingArguments(..., per_device_train_batch_size=8, gradient_accumulation_steps=8)
    LockstepTrainer(model, arguments, train_dataset=dataset).train()

The arguments describe the training of one process: here 64 samples a step, in 8 micro-batches of 8.
With several ranks, each computes its share of the micro-batches, and the loss curve stays the same.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lockstep.checks.divergence import ReplicaCheck
from lockstep.data.iterable.stream_loader import StreamLoader
from lockstep.data.keyed import KeyedDataset, Keys, worker_setup
from lockstep.data.loader import Loader
from lockstep.data.windows import Window
from lockstep.errors import LockstepWarning, UsageError
from lockstep.integrations.accelerate import (
    check_ranks,
    gather_rows,
    refuse,
    share_memory,
    total_weight,
)
from lockstep.integrations.batches import RankBatches
from lockstep.runtime import extras, randomness, status
from lockstep.world.world import World, init

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import sort_checkpoints
except ImportError as error:
    raise extras.missing(
        "lockstep.integrations.transformers", f"transformers ({error})", "transformers"
    ) from None
extras.warn_untested("transformers", "5.23", "5.24")
_log = logging.getLogger(__name__)
_HOST = "transformers.Trainer"
_ORDERS = ("random", "sequential", "group_by_length")
_UNFINISHED = "checkpoint-is-incomplete.txt"  # while enable_jit_checkpoint writes
_OWN_CLASS = "use transformers' own Trainer"


def _check(args: TrainingArguments) -> None:
    """Refuse options with which the training would differ from that of one process."""
    config: Any = args.accelerator_config
    for name, value, plain, instead in (
        ("ignore_data_skip", args.ignore_data_skip, False, "skipping reads no sample here"),
        ("auto_find_batch_size", args.auto_find_batch_size, False, "state the batch size"),
        ("average_tokens_across_devices", args.average_tokens_across_devices, True, "leave it out"),
        ("split_batches", config.split_batches, False, "every step is split here"),
        ("dispatch_batches", config.dispatch_batches or False, False, "each rank reads its share"),
        ("deepspeed", args.deepspeed, None, _OWN_CLASS),
        ("fsdp", args.fsdp or None, None, _OWN_CLASS),
        ("parallelism_config", args.parallelism_config, None, _OWN_CLASS),
        ("n_gpu", max(args.n_gpu, 1), 1, "start one rank for each GPU by `lockstep run`"),
    ):
        if value != plain:
            refuse(name, value, instead)
    order = args.train_sampling_strategy
    if order not in _ORDERS:
        refuse("train_sampling_strategy", str(order), f"use one of {', '.join(_ORDERS)}")


class LockstepTraining(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """A base class that makes a Trainer with several ranks train as one process would. Name it
    first: `class Mine(LockstepTraining, SFTTrainer)`.

    `per_device_train_batch_size` is the micro-batch, and `gradient_accumulation_steps` the number
    of micro-batches of a step, over all ranks. The order, a collator's random masks, dropout and
    the loss's weights do not depend on the number of ranks. A resume continues with the next
    sample.

    A training loader of your own (`get_train_dataloader`), its sampler, batch sampler and batch
    size are used: its batches are the micro-batches. What the class computes in `compute_loss` is
    the mean over one micro-batch; `num_items_in_batch` is that micro-batch's number.

    Args:
        arguments, options: as for the other base class.

    Raises:
        UsageError: options with another meaning; a Trainer class whose methods do not
            call these ones; the checkpoint of another training.
        ReplicaDivergence: on all ranks, naming the parameter and the ranks.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        positional = list(arguments)
        args = None
        for index, argument in enumerate(arguments):
            # its position depends on the class: trl's DPOTrainer has it third
            if args is None and isinstance(argument, TrainingArguments):
                args = positional[index] = copy.copy(argument)
        if args is None:
            args = copy.copy(options.get("args"))
            if args is None:
                args = TrainingArguments("tmp_trainer")
            options["args"] = args
        _check(args)
        self.world: World = init(device=args.device)
        check_ranks(_HOST, args.world_size, self.world)
        self._micro_batches = args.gradient_accumulation_steps
        args.average_tokens_across_devices = False  # the weights do it
        self._slots: list[int] = []  # of this rank's batches of the current step
        self._counts: list[float] = []  # number of items that each batch's loss is a mean over
        self._total = 0.0  # sum of these numbers over all ranks
        self._index = 0  # of the current batch among this rank's batches of the step
        self._factor = 1.0  # of the current batch's gradient
        self._backward_called = False
        self._hooked: nn.Module | None = None
        self._divided: _DataLoader | _StreamBatches | None = None
        super().__init__(*positional, **options)
        self.add_callback(LockstepCallback())

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        backward = accelerator.backward

        def weighted(loss: Tensor, **options: Any) -> None:
            self._backward_called = True
            backward(loss * self._factor, **options)

        accelerator.backward = weighted
        accelerator.gather = partial(gather_rows, accelerator.gather)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Train as transformers' Trainer does. `resume_from_checkpoint=True` takes the newest
        checkpoint that is complete.

        Args:
            resume_from_checkpoint: as for the Trainer.
            arguments, options: as for the Trainer.
        """
        self.args.gradient_accumulation_steps = self._micro_batches
        self._counts = []
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._newest_checkpoint()
        return super().train(resume_from_checkpoint, *arguments, **options)

    def _newest_checkpoint(self) -> str | bool:
        """Return the newest checkpoint with a readable state, which the Trainer writes last; True
        if there is none.
        """
        for folder in reversed(sort_checkpoints(str(self.args.output_dir))):
            try:
                if Path(folder, _UNFINISHED).exists():
                    raise ValueError(f"{_UNFINISHED} is there")
                json.loads(Path(folder, TRAINER_STATE_NAME).read_text())
            except (OSError, ValueError) as error:
                if self.args.should_log:
                    reason = f"{folder} is incomplete ({error}); an older checkpoint is tried."
                    warnings.warn(reason, LockstepWarning, stacklevel=3)
            else:
                return str(folder)
        return True

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        # only the loop accumulates a rank's share: samplers read the number of the whole step
        args.gradient_accumulation_steps = -(-self._micro_batches // self.world.size)
        return super().set_initial_training_values(args, self._divide(dataloader))

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        divided = self._divide(train_dataloader)
        return super()._prepare_for_training(max_steps, divided, resume_from_checkpoint)

    def _divide(self, undivided: Any) -> _DataLoader | _StreamBatches:
        """Return a loader of this rank's share of the batches of `undivided`."""
        if isinstance(undivided, _DataLoader | _StreamBatches):
            return undivided
        if self._divided is not None and self._divided.undivided is undivided:
            return self._divided
        if not isinstance(undivided, DataLoader):
            reason = (
                f"get_train_dataloader returned a {type(undivided).__name__}, and no DataLoader"
            )
            raise UsageError("trainer-loader", host=_HOST, reason=reason)
        args = self.args
        count = args.gradient_accumulation_steps
        seed = args.seed if args.data_seed is None else args.data_seed
        options = {"seed": seed, "drop_last": args.dataloader_drop_last}
        if isinstance(undivided.dataset, IterableDataset):
            args.ignore_data_skip = True  # a resume loads the stream's position
            self._divided = _StreamBatches(undivided, self._micro_batches, count, **options)
        else:
            loader = _loader_of(undivided, self._micro_batches, **options)
            self._divided = _DataLoader(loader, count, undivided)
        if args.should_log:
            idle = self._micro_batches < self.world.size
            _log.log(logging.WARNING if idle else logging.INFO, self._divided.loader.describe())
        return self._divided

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        total: int = super().get_total_train_batch_size(args) * self._micro_batches
        return total // (args.gradient_accumulation_steps * self.world.size)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return this rank's batches of a step, and None: `_counts` has a count for each batch."""
        self._check_called()
        assert self._divided is not None
        batches = []
        self._counts = []
        self._slots = []
        self._index = 0
        for number in range(num_batches):
            batch, items = super().get_batch_samples(epoch_iterator, 1, device)
            if not batch:
                break
            batches += batch
            slot, samples = self._divided.at(self.state.global_step, number)
            self._slots.append(slot)
            self._counts.append(float(samples if items is None or not samples else items))
        self._total = total_weight(self._counts, self.world)
        return batches, None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if isinstance(model, DistributedDataParallel) and model is not self._hooked:
            self._hooked = model
            share_memory(model, self.world)
        if self._index >= len(self._counts):
            raise _not_called(type(self).get_batch_samples, "super().get_batch_samples()")
        count = self._counts[self._index]
        slot = self._slots[self._index]
        # so the loss is the mean over this batch's count, also for models that divide by `items`
        items = torch.tensor(max(count, 1.0), device=self.args.device)
        self.current_gradient_accumulation_steps = 1  # the loss is divided by nothing else
        factor = self._factor = count * self.world.size / self._total
        self._backward_called = False
        with randomness.preserved(devices=True):
            randomness.step(self.args.seed, self.state.global_step, slot)
            loss: Tensor = super().training_step(model, inputs, items)
        self._factor = 1.0
        if not self._backward_called:
            parent: Any = super()
            raise _not_called(parent.training_step, "self.accelerator.backward(loss)")
        self._index += 1
        return loss * factor

    def _check_called(self) -> None:
        """Raise UsageError if the last step had batches and none came to `training_step`."""
        if self._counts and not self._index:
            raise _not_called(type(self).training_step, "super().training_step()")

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        self._check_called()
        # of the steps after the last log, the Trainer would report this rank's share of the loss
        self._tr_loss: Tensor = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*arguments, **options)


def _not_called(method: Any, needed: str) -> UsageError:
    return UsageError("trainer-loss-not-weighted", method=method.__qualname__, needed=needed)


def _loader_of(undivided: DataLoader[Any], micro_batches: int, **options: Any) -> Loader:
    """Return a Loader whose micro-batches are the batches of a DataLoader in one process."""
    dataset = undivided.dataset
    batches: Any = undivided.batch_sampler or undivided.sampler
    while hasattr(batches, "batch_sampler"):  # Accelerate has divided it among the ranks
        batches = batches.batch_sampler
    if type(batches) is not BatchSampler:
        return Loader(dataset, order=batches, micro_batches=micro_batches, **options)
    sampler: Any = batches.sampler
    permutes = isinstance(sampler, RandomSampler) and not sampler.replacement
    if permutes and sampler.num_samples == len(sampler.data_source):
        options["shuffle"] = True
    elif type(sampler) is SequentialSampler:
        options["shuffle"] = False
    else:
        options["order"] = sampler
    size = batches.batch_size
    return Loader(dataset, global_batch=size * micro_batches, micro_batch=size, **options)


class LockstepTrainer(LockstepTraining, Trainer):
    """transformers.Trainer on Lockstep.

    Example::

        trainer = LockstepTrainer(model, training_arguments, train_dataset=dataset)
        trainer.train()

    Args:
        arguments, options: as for transformers.Trainer.
    """


class LockstepCallback(TrainerCallback, ExportableState):
    """Compares the replicas after steps 1 and 2, then every 100 steps, before each checkpoint and
    at the end. Reports the steps to `lockstep run`. Refuses the checkpoint of another training.
    """

    def __init__(self) -> None:
        self.fingerprint: dict[str, Any] | None = None
        """The Loader's fingerprint, which is saved with each checkpoint."""
        self._check = ReplicaCheck()
        self._stream: _StreamBatches | None = None

    def state(self) -> dict[str, Any]:
        attributes: dict[str, Any] = {"fingerprint": self.fingerprint}
        if self._stream is not None:
            attributes["position"] = self._stream.state_dict()
        return {"args": {}, "attributes": attributes}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        batches: _DataLoader | _StreamBatches = more["train_dataloader"]
        loader = batches.loader
        position = loader.state_dict()
        # the Trainer's own checkpoints lack it, and a save expects it
        entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        attributes = entry["attributes"]
        saved = attributes["fingerprint"]
        self.fingerprint = position["fingerprint"]
        if isinstance(batches, _StreamBatches):
            self._stream = batches
            if "position" in attributes and state.global_step:
                batches.load_state_dict(attributes["position"])
                return
        if state.global_step and saved is not None:
            loader.load_state_dict({**position, "fingerprint": saved})
        elif state.global_step and args.should_log:
            warnings.warn(
                "the checkpoint is of transformers' own Trainer: the order and the number of samples"
                f" of a step differ from here on: {loader.describe()}.",
                LockstepWarning,
                stacklevel=2,
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        status.step(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_save or self._check.due(state.global_step):
            self._compare(state, f"after step {state.global_step}", more["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_save:
            self._compare(state, f"after epoch {state.epoch:.0f}", more["model"])

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if args.save_strategy == "best":  # a save may follow
            self._compare(state, "before a checkpoint", more["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._compare(state, "at the end of the training", more["model"])

    def _compare(self, state: Any, when: str, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self._check.compare([(World.current().group, named)], state.global_step, when)


class _KeysOfRank(Sampler[Keys]):
    """Yields the samples of this rank's micro-batches, `count` of them a step. If the rank has
    fewer, slot 0's samples fill the rest and count 0.
    """

    def __init__(self, loader: Loader, count: int) -> None:
        self.loader = loader
        self._count = count
        self._epoch = 0
        self._first: int | None = None  # the number of the epoch's first step

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._first = None

    def __len__(self) -> int:
        return len(self.loader) * self._count

    def window(self, step: int) -> Window:
        """Return this rank's part of step `step`, without its batches."""
        loader = self.loader
        epoch = self._epoch
        if self._first is None:  # the epoch begins, or a resume has skipped its first steps
            self._first = min(step, epoch * len(loader))
        cut = loader.batch_plan.plan(epoch).at(step - self._first, epoch, step)
        counts = loader.batch_plan.counts_of(cut)
        return Window(cut, loader.rank, loader.size, lambda: None, counts)

    def __iter__(self) -> Iterator[Keys]:
        loader = self.loader
        epoch = self._epoch
        plan = loader.batch_plan.plan(epoch)
        # the Trainer takes as many steps of every epoch as epoch 0 has
        steps = range(min(len(loader), plan.steps_per_epoch))
        local = loader.batch_plan.indices(epoch, steps, loader.share)
        first = loader.batch_plan.indices(epoch, steps, range(1))
        for step, first_slot in zip(steps, first, strict=True):
            filled = len(plan.at(step, epoch, step).filled(loader.rank, loader.size))
            for indices in islice(local, filled):
                yield epoch, indices
            for _ in range(self._count - filled):
                yield epoch, first_slot


class _DataLoader(DataLoader[Any]):
    """torch's DataLoader over keys. So accelerate's skip_first_batches skips keys and reads no
    sample.
    """

    def __init__(self, loader: Loader, count: int, undivided: DataLoader[Any]) -> None:
        self.loader = loader
        self.undivided = undivided
        self.keys = _KeysOfRank(loader, count)
        self._window: Window | None = None  # of the current step
        seed = loader.recipe["seed"]
        super().__init__(
            KeyedDataset(undivided.dataset, seed, undivided.collate_fn, loader.rank),
            # any object may be a batch's indices: DataLoader passes it to __getitems__
            batch_sampler=self.keys,  # type: ignore[arg-type]
            collate_fn=_unchanged,
            num_workers=undivided.num_workers,
            pin_memory=undivided.pin_memory,
            prefetch_factor=undivided.prefetch_factor,
            persistent_workers=undivided.persistent_workers,
            multiprocessing_context=undivided.multiprocessing_context,
            timeout=undivided.timeout,
            worker_init_fn=partial(_set_up, undivided.worker_init_fn, worker_setup()),
        )

    def set_epoch(self, epoch: int) -> None:
        self.keys.set_epoch(epoch)
        self._window = None

    def at(self, step: int, number: int) -> tuple[int, int]:
        """Return the slot of this rank's batch `number` of a step and its samples, 0 of a copy."""
        window = self._window
        if window is None or window.step != step:
            window = self._window = self.keys.window(step)
        if number >= len(window):
            return 0, 0
        return window.slots[number], window.counts[number]


class _StreamBatches(RankBatches):
    """This rank's share of the batches of a DataLoader over a stream, which every rank reads."""

    host = _HOST

    def __init__(
        self, undivided: DataLoader[Any], micro_batches: int, count: int, **options: Any
    ) -> None:
        size = undivided.batch_size or 1
        loader = StreamLoader(
            undivided.dataset,
            global_batch=size * micro_batches,
            micro_batch=size,
            num_workers=undivided.num_workers,
            collate_fn=undivided.collate_fn,
            sharding="items",
            device="cpu",
            **options,
        )
        super().__init__(loader, count)
        self.undivided = undivided
        self.dataset = undivided.dataset
        self.batch_size = size

    def at(self, step: int, number: int) -> tuple[int, float]:
        """Return the slot of the batch that was yielded last and its samples, 0 of a copy."""
        return self.slot, self.weight


def _set_up(first: Any, second: Any, worker: int) -> None:
    for function in filter(None, (first, second)):
        function(worker)


def _unchanged(batch: Any) -> Any:
    """Return the batch: KeyedDataset has collated it already."""
    return batch
