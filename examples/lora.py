"""LoRA: adapters of PEFT in a frozen GPT-2. Only the adapters' gradients travel.

    lockstep train examples/lora.py --workers 2 --exact --run runs/lora
    python examples/lora.py runs/lora adapter          # for PeftModel.from_pretrained(base, "adapter")

The model is small and random; in its place load one, with GPT2LMHeadModel.from_pretrained(...).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep

VOCABULARY, LENGTH = 61, 24


def base() -> nn.Module:
    torch.manual_seed(0)  # as a file of weights would be: the same in every process
    small = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    small.initializer_range, small.bos_token_id, small.eos_token_id = 0.2, 0, 0
    return GPT2LMHeadModel(small)


def adapted() -> nn.Module:
    """Its base is frozen by PEFT."""
    layers = ["c_attn", "c_fc", "c_proj"]
    config = LoraConfig(r=8, lora_dropout=0.05, target_modules=layers, fan_in_fan_out=True)
    return get_peft_model(base(), config)


def data(count: int, seed: int) -> TensorDataset:
    """Arithmetic progressions modulo the size of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    start, stride = torch.randint(1, VOCABULARY, (2, count, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(LENGTH)) % VOCABULARY)


def loss(output: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
    logits, targets = output.logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()
    return F.cross_entropy(logits, targets, reduction="sum"), len(targets)


def task(epochs: int = 2) -> lockstep.Task:
    return lockstep.Task(
        model=adapted,
        inputs=lambda batch: {"input_ids": batch[0]},  # keywords of the model
        train_data=data(256, seed=0),
        eval_data=data(64, seed=1),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(
            [each for each in model.parameters() if each.requires_grad], lr=1e-2
        ),
        global_batch=32,
        micro_batch=8,
        epochs=epochs,
    )


def export(run: Path, out: Path) -> None:
    """The newest checkpoint's adapters, as PEFT saves them."""
    model: Any = adapted()
    newest = max((run / "checkpoints").glob("step-*"))
    model.load_state_dict(load_file(newest / "model.safetensors"))
    model.save_pretrained(out)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
