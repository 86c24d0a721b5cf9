"""What a user of transformers.Trainer runs by `lockstep run`, on two ranks, then on one and three.

python transformers_script.py FOLDER
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

import lockstep
from lockstep.errors import LockstepWarning, ReplicaDivergence
from lockstep.integrations.transformers import LockstepTrainer, LockstepTraining
from tests.refused import refused

SAMPLES, LENGTH, MICRO_BATCH, MICRO_BATCHES, STEPS, SAVED = 50, 8, 2, 6, 8, 6
SEED, RATE = 5, 0.01


class Text(Dataset[dict[str, Tensor]]):
    """The first token says which sample it is; how many are labels differs. Of every second sample
    none is: some micro-batches have none at all.
    """

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= SAMPLES:
            raise IndexError(index)  # ends an iteration
        tokens = torch.randint(0, 40, (LENGTH,), generator=torch.Generator().manual_seed(index))
        tokens[0] = index
        labels = tokens.clone()
        labels[(3 + index % 5) * (index % 2) :] = -100
        return {"input_ids": tokens, "labels": labels}


def gpt2(dropout: float = 0.1) -> nn.Module:
    set_seed(0)
    sizes = {"vocab_size": SAMPLES, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    model.loss_type = "ForCausalLM"  # else a sample's first label counts, which is not predicted
    return model


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Draws which labels count, as the collator of a masked language model does."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch["labels"][torch.rand(batch["labels"].shape) < 0.3] = -100
    return batch


def arguments(folder: Path | str, **options: Any) -> TrainingArguments:
    options = {
        "use_cpu": True,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "seed": SEED,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }
    return TrainingArguments(str(folder), **options)


class Seeing(LockstepTrainer):
    """Notes the samples of each step, by their first tokens."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.seen: list[list[int]] = []
        super().__init__(*arguments, **options)

    def get_batch_samples(self, *given: Any) -> Any:
        divided: Any = self._divided
        at, samples = type(divided).at, []

        def noted(step: int, number: int) -> Any:
            samples.append(at(divided, step, number)[1])
            return at(divided, step, number)

        divided.at = noted
        batches, count = super().get_batch_samples(*given)
        real = [batch for batch, samples in zip(batches, samples, strict=True) if samples]
        if batches:  # the Trainer asks a stream that has ended, too
            self.seen.append([int(row[0]) for batch in real for row in batch["input_ids"]])
        return batches, count


def curve(
    folder: Path, data: Any = None, *, resume: bool = False, save: bool = False
) -> dict[str, list[Any]]:
    """The loss and the samples of each step."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": SAVED} if save else {}
    given = arguments(folder / "saved", **saving)
    trainer = Seeing(gpt2(), given, train_dataset=data or Text(), data_collator=collated)
    trainer.train(resume_from_checkpoint=str(saved_in(folder)) if resume else None)
    assert given.gradient_accumulation_steps == MICRO_BATCHES
    logged = [log for log in trainer.state.log_history if "loss" in log]
    losses = [log["loss"] for log in logged if not resume or log["step"] > SAVED]
    return {"losses": losses, "seen": trainer.seen}


def saved_in(folder: Path) -> Path:
    return folder / "saved" / f"checkpoint-{SAVED}"


def by_hand() -> list[float]:
    """The losses of the same in a plain loop: the mean over all labels of a step, AdamW, clipped, a
    falling rate.
    """
    model = gpt2().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    loader = lockstep.Loader(
        Text(),
        global_batch=MICRO_BATCH * MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        seed=SEED,
        collate_fn=collated,
        rank=0,
        size=1,
    )
    lockstep.seed(SEED)
    losses: list[float] = []
    for window in islice(chain.from_iterable(loader.epochs(2)), STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (STEPS - window.step) / STEPS
        total, count = 0.0, 0
        for slot, batch in enumerate(window):
            with lockstep.stream("step", window.step, slot):
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            loss.backward()
            total, count = total + loss.item(), count + int((labels != -100).sum())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / count)
    return losses


def parity(folder: Path) -> None:
    """20 steps as with the Trainer's own DDP, on the same samples."""
    common: dict[str, Any] = {
        "max_steps": 20,
        "train_sampling_strategy": "sequential",
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    group = lockstep.World.current().group
    for options in ({}, {"bf16": True}):
        models = []
        for kind, count in ((LockstepTrainer, 4), (Trainer, 2)):
            before = group.number
            given = arguments(folder, gradient_accumulation_steps=count, **common, **options)
            # as many samples as whole steps hold: theirs repeats some to fill the last one
            data = torch.utils.data.Subset(Text(), range(48))
            models.append(gpt2(0.0))
            kind(models[-1], given, train_dataset=data).train()
            assert (group.number - before >= 20) == (kind is LockstepTrainer)  # by shared memory
        for ours, theirs in zip(*(each.parameters() for each in models), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class Drifting(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3 and args.process_index == 1:
            with torch.no_grad():
                more["model"].transformer.wte.weight[0, 0] += 1e-3


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Text())


class Unweighted(LockstepTrainer):
    """The mean of each micro-batch, which the Trainer would divide by their number."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        return model(**inputs).loss


class Own(Trainer):
    """With the signature of transformers' documentation, and `args` where trl's DPOTrainer has it."""

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, **options: Any) -> None:
        assert ref_model is None
        super().__init__(model, args, **options)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


WEIGHTS = [float(index % 3) for index in range(SAMPLES)]


class Pairs(BatchSampler):
    """Batches with a rule: two neighbours. Every second epoch has fewer."""

    def __init__(self) -> None:
        super().__init__(SequentialSampler(range(SAMPLES)), 2, drop_last=False)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), len(self) - 8 * (self.epoch % 2))


class Sampled(Trainer):
    def _get_train_sampler(self, *more: Any) -> Any:
        return WeightedRandomSampler(WEIGHTS, SAMPLES)


class Balanced(Trainer):
    """A loader of its own: a weighted sampler and another batch size."""

    def get_train_dataloader(self) -> Any:
        sampler = WeightedRandomSampler(WEIGHTS, SAMPLES)
        loader = DataLoader(self.train_dataset, batch_size=5, sampler=sampler)
        return self.accelerator.prepare(loader)


class Paired(Trainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_sampler=Pairs())


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, *more: Any) -> Any:
        loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


class NoSamples(LockstepTrainer):
    def get_batch_samples(self, *arguments: Any) -> Any:
        return Trainer.get_batch_samples(self, *arguments)


class NoStep(LockstepTrainer):
    def training_step(self, *arguments: Any) -> Any:
        return Trainer.training_step(self, *arguments)


def synchronized(kind: type[Trainer]) -> type[Trainer]:
    """As a user writes it: `class Their(LockstepTraining, kind): pass`."""
    return type(f"Lockstep{kind.__name__}", (LockstepTraining, kind), {})


def reported_loss(folder: Path) -> None:
    """`training_loss` is the mean over all samples, though nothing was logged before the end and
    rank 0 has two of three micro-batches.
    """

    def trained(logging_steps: int) -> tuple[float, list[float]]:
        given = arguments(folder, gradient_accumulation_steps=3, logging_steps=logging_steps)
        trainer = LockstepTrainer(gpt2(), given, train_dataset=Text())
        result = trainer.train()
        return result.training_loss, [log["loss"] for log in trainer.state.log_history[:-1]]

    _, losses = trained(1)
    reported, _ = trained(100)
    assert abs(reported - sum(losses) / STEPS) < 1e-5 * reported, (reported, losses)


def samples_of(kind: type[Trainer], folder: Path, **options: Any) -> list[list[int]]:
    """The samples of each step, of both ranks."""
    seeing = type("Seen", (Seeing, kind), {})
    trainer = seeing(gpt2(), arguments(folder, max_steps=11, **options), train_dataset=Text())
    trainer.train()
    ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(ranks, trainer.seen)
    return [first + second for first, second in zip(*ranks, strict=True) if first + second]


def own_loaders(folder: Path) -> None:
    """Samplers, batch samplers and batch sizes of a Trainer class: their batches in their order, as
    in one process.
    """
    group = MICRO_BATCH * MICRO_BATCHES
    for kind, options, expected in (
        (Sampled, {}, {"order": WeightedRandomSampler(WEIGHTS, SAMPLES), "global_batch": group}),
        (Balanced, {}, {"order": WeightedRandomSampler(WEIGHTS, SAMPLES), "global_batch": 30}),
        (Paired, {}, {"order": Pairs(), "micro_batches": MICRO_BATCHES}),
        (
            Trainer,
            {"train_sampling_strategy": "group_by_length"},
            {
                "order": LengthGroupedSampler(group, lengths=[LENGTH] * SAMPLES),
                "global_batch": group,
            },
        ),
    ):
        sizes = {"micro_batch": expected["global_batch"] // 6} if "global_batch" in expected else {}
        loader = lockstep.Loader(Text(), seed=SEED, rank=0, size=1, **expected, **sizes)
        windows = islice(chain.from_iterable(loader.epochs(9)), 11)
        samples = [
            [int(row[0]) for batch in window for row in batch["input_ids"]] for window in windows
        ]
        assert samples_of(kind, folder, **options) == samples, kind


def called_hooks(kinds: tuple[type[Trainer], ...], last: bool, folder: Path) -> set[str]:
    """The methods of transformers' Trainer that a training calls, where each is overridden: in a
    base class, or (`last`) in the class itself.
    """
    called: set[str] = set()

    def noting(name: str) -> Any:
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            called.add(name)
            return getattr(super(overriding, self), name)(*arguments, **options)

        return method

    names = [
        name
        for name, value in vars(Trainer).items()
        if inspect.isfunction(value) and not name.startswith("__")
    ]
    methods = {name: noting(name) for name in names}
    overriding: Any = type("Overriding", kinds if last else (Trainer,), methods)
    kind = overriding if last else type("Combined", (*kinds[:-1], overriding), {})
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    given = arguments(folder, max_steps=3, **options)
    data = Subset(Text(), range(1, 12))
    trainer = kind(gpt2(), given, train_dataset=Text(), eval_dataset=data)
    trainer.train()
    trainer.train(resume_from_checkpoint=True)
    trainer.predict(data)
    return called


def hooks(folder: Path) -> None:
    """Whatever method of transformers' Trainer a class overrides is called as without Lockstep."""
    theirs = called_hooks((Trainer,), False, folder / "theirs")
    assert len(theirs) > 40
    for last in (False, True):
        ours = called_hooks((LockstepTraining, Trainer), last, folder / f"ours-{last}")
        assert not theirs - ours, theirs - ours


def other_checkpoints(folder: Path) -> None:
    """A checkpoint of transformers' own Trainer, with a warning; and the newest complete one."""
    for kind, steps in ((Trainer, 2), (LockstepTrainer, 6)):
        given = arguments(folder, max_steps=steps, save_strategy="steps", save_steps=2)
        trainer = kind(gpt2(), given, train_dataset=Text())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=steps > 2)
        own = [str(each.message) for each in caught if each.category is LockstepWarning]
        assert len(own) == (steps > 2 and given.process_index == 0), own
    trainer.accelerator.wait_for_everyone()
    if given.process_index == 0:
        (folder / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": 1')
    trainer.accelerator.wait_for_everyone()
    again = LockstepTrainer(gpt2(), given, train_dataset=Text())
    again.train(resume_from_checkpoint=True)
    assert again._initial_global_step == 4
    for one, other in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def refusals(folder: Path) -> None:
    def trained(kind: type[Trainer] = LockstepTrainer, /, data: Any = None, **options: Any) -> Any:
        callbacks = options.pop("callbacks", None)
        resume = options.pop("resume", None)
        given = arguments(folder / "refused", **{"max_steps": 4, **options})
        order = (None, given) if issubclass(kind, Own) else (given,)
        trainer = kind(gpt2(), *order, train_dataset=data or Text(), callbacks=callbacks)
        assert trainer.args.max_steps == given.max_steps
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    for name, value in (
        ("ignore_data_skip", True),
        ("auto_find_batch_size", True),
        ("average_tokens_across_devices", False),
        ("train_sampling_strategy", "batch_rebalance"),
    ):
        with refused("keyword-without-meaning", name=name, value=value):
            trained(**{name: value})
    for name in ("split_batches", "dispatch_batches"):
        with refused("keyword-without-meaning", name=name, value=True):
            trained(accelerator_config={name: True})
    with refused("host-sees-other-ranks", seen=1, size=2):
        trained(use_cpu=False)
    for kind, method in (
        (NoSamples, "NoSamples.get_batch_samples"),
        (NoStep, "NoStep.training_step"),
        (synchronized(OwnStep), "OwnStep.training_step"),
    ):
        with refused("trainer-loss-not-weighted", method=method):
            trained(kind)
    weighted = synchronized(Own)
    by_keyword = weighted(model=gpt2(), args=arguments(folder, max_steps=3), train_dataset=Text())
    assert by_keyword.args.max_steps == 3
    weights = [list(trained(kind).model.parameters()) for kind in (LockstepTrainer, Unweighted)]
    for one, other in zip(*weights, strict=True):  # compute_loss without super() is weighted too
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    again = trained(weighted, dataloader_num_workers=1, dataloader_drop_last=True)
    assert again.state.epoch == 1
    again.train_dataset = Subset(again.train_dataset, range(16))
    again.train()  # on other data: no resume
    with refused("replicas-differ", ReplicaDivergence, parameter="transformer.wte.weight"):
        trained(callbacks=[Drifting()])
    with refused("another-training") as caught:
        trained(seed=6, max_steps=STEPS, resume=str(saved_in(folder)))
    assert caught.value.values["differences"].endswith("seed was 5 and is 6")


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    world = lockstep.init()
    results: dict[str, Any] = {
        name: curve(
            folder / name if data else folder, data, save=world.size == 2, resume=world.size == 3
        )
        for name, data in (("trained", None), ("stream", Stream()))
    }
    if world.size == 1:
        results["by hand"] = by_hand()
    if world.size == 2:
        parity(folder / "parity")
        reported_loss(folder / "reported")
        own_loaders(folder / "loaders")
        hooks(folder / "hooks")
        other_checkpoints(folder / "other")
        refusals(folder)
    (folder / f"{world.size}-{world.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
