"""Hugging Face's Trainer on Lockstep: `lockstep run --workers 2 train.py`.

    from lockstep.integrations.transformers import LockstepTrainer

    arguments = TrainingArguments(..., per_device_train_batch_size=8, gradient_accumulation_steps=8)
    LockstepTrainer(model, arguments, train_dataset=dataset).train()

The arguments describe the training of one process: here 64 samples a step, in 8 micro-batches of 8.
With several ranks, each computes its share of the micro-batches, and the loss curve stays the same.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lockstep.checks.divergence import ReplicaCheck
from lockstep.data.keyed import KeyedDataset, Keys, worker_setup
from lockstep.data.loader import Loader
from lockstep.errors import UsageError
from lockstep.integrations.accelerate import check_ranks, refuse, share_memory, summed
from lockstep.runtime import extras, randomness, status
from lockstep.world.world import World, init

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise extras.missing(
        "lockstep.integrations.transformers", f"transformers ({error})", "transformers"
    ) from None
extras.warn_untested("transformers", "5.23", "5.24")
_log = logging.getLogger(__name__)
_HOST = "transformers.Trainer"
_ORDERS = ("random", "sequential")
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
    if (order := args.train_sampling_strategy) not in _ORDERS:
        refuse("train_sampling_strategy", str(order), f"use one of {', '.join(_ORDERS)}")


def _refuse_loader(method: Callable[..., Any]) -> NoReturn:
    raise UsageError("trainer-own-loader", method=method.__qualname__)


class LockstepTraining(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """A base class that makes a Trainer with several ranks train as one process would. Name it
    first: `class Mine(LockstepTraining, SFTTrainer)`.

    `per_device_train_batch_size` is the micro-batch, and `gradient_accumulation_steps` the number
    of micro-batches of a step, over all ranks. The order, a collator's random masks, dropout and
    the loss's weights do not depend on the number of ranks. A resume continues with the next
    sample.

    Args:
        arguments, options: as for the other base class.

    Raises:
        UsageError: options with another meaning; a stream; a Trainer class with a training loader
            or a sampler of its own; the checkpoint of another training.
        ReplicaDivergence: on all ranks, naming the parameter and the ranks.
    """

    # transformers' flag that compute_loss has scaled the loss for gradient accumulation
    loss_is_scaled_for_ga: bool | None = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        positional = list(arguments)
        types = [isinstance(argument, TrainingArguments) for argument in positional]
        if True in types:  # its position depends on the class: trl's DPOTrainer has it third
            args = positional[types.index(True)] = copy.copy(positional[types.index(True)])
        else:
            given = options.get("args")
            args = TrainingArguments("tmp_trainer") if given is None else copy.copy(given)
            options["args"] = args
        _check(args)
        self.world: World = init(device=args.device)
        check_ranks(_HOST, args.world_size, self.world)
        self._micro_batches = args.gradient_accumulation_steps
        args.gradient_accumulation_steps = -(-self._micro_batches // self.world.size)
        args.average_tokens_across_devices = False  # compute_loss does it
        self._filled = range(0)  # this rank's slots of the current step
        self._counts: list[float] = []  # number of items that each batch's loss is a mean over
        self._total = 0.0  # sum of these numbers over all ranks
        self._place = 0  # index of the current batch among this rank's batches of the step
        self._factor: float | None = None
        self._hooked: nn.Module | None = None
        super().__init__(*positional, **options)
        self.add_callback(LockstepCallback())

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[..., Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """For a training, return a loader of this rank's micro-batches, with the Trainer's data
        set, collator and workers.
        """
        theirs: DataLoader[Any] = super()._get_dataloader(
            dataset, description, batch_size, sampler_fn, is_training, dataloader_key
        )
        if not is_training:
            return theirs
        if isinstance(theirs.dataset, IterableDataset):
            raise UsageError("trainer-loader", host=_HOST, reason="its data set is a stream")
        args, kind = self.args, type(self)
        if kind._get_train_sampler is not Trainer._get_train_sampler:
            _refuse_loader(kind._get_train_sampler)
        parent: Any = super(LockstepTraining, kind)
        if parent._get_dataloader is not Trainer._get_dataloader:
            _refuse_loader(parent._get_dataloader)
        if sampler_fn != self._get_train_sampler or batch_size != args.train_batch_size:
            _refuse_loader(kind.get_train_dataloader)
        micro_batch = args.per_device_train_batch_size
        self._loader = Loader(
            theirs.dataset,
            global_batch=micro_batch * self._micro_batches,
            micro_batch=micro_batch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=args.train_sampling_strategy == "random",
            drop_last=args.dataloader_drop_last,
        )
        if args.should_log:
            idle = self._micro_batches < self.world.size
            _log.log(logging.WARNING if idle else logging.INFO, self._loader.describe())
        return _DataLoader(self._loader, args.gradient_accumulation_steps, theirs)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        if not isinstance(dataloader, _DataLoader):  # it was not made by _get_dataloader
            _refuse_loader(type(self).get_train_dataloader)
        return super().set_initial_training_values(args, dataloader)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return int(args.per_device_train_batch_size * self._micro_batches)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """Return this rank's batches of a step, and None: `_counts` has a count for each batch."""
        cut, batches = self._loader.plan.cut(self.state.global_step), []
        self._filled = cut.filled(self.world.rank, self.world.size)
        self._counts, self._place = [], 0
        for number in range(num_batches):
            one, count = super().get_batch_samples(epoch_iterator, 1, device)
            batches += one
            if number >= len(self._filled):
                count = 0
            elif count is None:
                count = len(cut.positions(self._filled[number]))
            self._counts.append(float(count))
        self._total = summed(self._counts, self.world)
        return batches, None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if isinstance(model, DistributedDataParallel) and model is not self._hooked:
            self._hooked = model
            share_memory(model, self.world)
        count = self._counts[self._place]
        slot = self._filled[self._place] if self._place < len(self._filled) else 0
        # so the loss is the mean over this batch's count, also for models that divide by `items`
        items = torch.tensor(max(count, 1.0), device=self.args.device)
        self._factor = count * self.world.size / self._total
        with randomness.preserved(devices=True):
            randomness.step(self.args.seed, self.state.global_step, slot)
            loss = super().training_step(model, inputs, items)
        if self._factor is not None:
            raise UsageError("trainer-loss-not-weighted", trainer=type(self).__name__)
        self._place += 1
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        result: Any = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )
        if self._factor is None:  # this is an evaluation
            return result
        factor, self._factor = self._factor, None
        return (result[0] * factor, *result[1:]) if return_outputs else result * factor

    def _finalize_training(self, *arguments: Any, **options: Any) -> Any:
        # of the steps after the last log, the Trainer would report this rank's share of the loss
        self._tr_loss: Tensor = self.accelerator.gather(self._tr_loss).mean()
        return super()._finalize_training(*arguments, **options)


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

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"fingerprint": self.fingerprint}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        loader = more["train_dataloader"].loader
        place = loader.state_dict()
        saved = state.stateful_callbacks.get(type(self).__name__, self.state())["attributes"]
        self.fingerprint = place["fingerprint"]
        if state.global_step and saved["fingerprint"] is not None:  # this is a resumed training
            loader.load_state_dict({**place, "fingerprint": saved["fingerprint"]})

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
        self._loader, self._count, self._epoch = loader, count, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader) * self._count

    def __iter__(self) -> Iterator[Keys]:
        loader, epoch, steps = self._loader, self._epoch, range(len(self._loader))
        mine = loader.batch_plan.indices(epoch, steps, loader.share)
        first = loader.batch_plan.indices(epoch, steps, range(1))
        for place, other in zip(steps, first, strict=True):
            filled = len(loader.plan.at(place, epoch, place).filled(loader.rank, loader.size))
            found = [*islice(mine, filled), *[other] * (self._count - filled)]
            yield from ((epoch, each) for each in found)


class _DataLoader(DataLoader[Any]):
    """torch's DataLoader over keys. So accelerate's skip_first_batches skips keys and reads no
    sample.
    """

    def __init__(self, loader: Loader, count: int, theirs: DataLoader[Any]) -> None:
        self.loader = loader
        seed = loader.recipe["seed"]
        super().__init__(
            KeyedDataset(theirs.dataset, seed, theirs.collate_fn, loader.rank),
            # any object may be a batch's indices: DataLoader passes it to __getitems__
            batch_sampler=_KeysOfRank(loader, count),  # type: ignore[arg-type]
            collate_fn=_made,
            num_workers=theirs.num_workers,
            pin_memory=theirs.pin_memory,
            prefetch_factor=theirs.prefetch_factor,
            persistent_workers=theirs.persistent_workers,
            multiprocessing_context=theirs.multiprocessing_context,
            worker_init_fn=worker_setup(),
        )

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _made(batch: Any) -> Any:
    """Return the batch: KeyedDataset has collated it already."""
    return batch
