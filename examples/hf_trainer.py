"""transformers.Trainer on Lockstep: the loss curve of one process with any number of workers, and
a resume in the middle of an epoch.

    lockstep run --workers 2 examples/hf_trainer.py

A small random GPT-2 learns to count. The first training saves after 10 steps, in the middle of the
second epoch. The second one resumes there, in place of a job that was killed.
"""

import logging
import tempfile

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from lockstep.integrations.transformers import LockstepTrainer

WORDS, LENGTH, SAVED = 64, 12, 10


class Counting(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(LENGTH) + index) % WORDS
        labels = tokens.clone()
        labels[LENGTH - index % 4 :] = -100  # samples of 9 to 12 tokens
        return {"input_ids": tokens, "labels": labels}


def train(folder: str, *, resume: str | None = None) -> LockstepTrainer:
    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a sample's first label counts, which is not predicted
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=4,  # a micro-batch
        gradient_accumulation_steps=6,  # micro-batches of a step, over all ranks
        max_steps=16,
        learning_rate=0.01,
        logging_steps=1,
        save_steps=SAVED,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = LockstepTrainer(model, arguments, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    logging.disable(logging.WARNING)
    whole = train(tempfile.mkdtemp())
    (folder,) = broadcast_object_list([whole.args.output_dir])
    resumed = train(folder, resume=f"{folder}/checkpoint-{SAVED}")
    if whole.is_world_process_zero():
        curves = [
            [each["loss"] for each in trainer.state.log_history if "loss" in each]
            for trainer in (whole, resumed)
        ]
        largest = max(abs(one - other) for one, other in zip(*curves, strict=True))
        print(f"{whole.args.world_size} ranks, {len(curves[0])} steps: same={largest < 1e-5}")
        print(f"loss {curves[0][0]:.4f}, {curves[0][-1]:.4f}")


if __name__ == "__main__":
    main()
