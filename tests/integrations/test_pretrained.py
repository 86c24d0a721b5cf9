"""`lockstep checkpoints export --format hf`: transformers' from_pretrained reads the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import lockstep
from lockstep.cli.checkpoints import app
from lockstep.testing import run_ranks
from lockstep.world.world import World

pytestmark = pytest.mark.rest


def trains_and_exports(_: World, folder: Path) -> list[list[str]]:
    """GPT-2, whose output layer is its embedding, and BERT. The names in each file."""
    import transformers

    tiny = {"vocab_size": 19, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    gpt2 = transformers.GPT2Config(n_positions=8, n_embd=8, n_layer=1, n_head=2, **tiny)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(
        intermediate_size=16, max_position_embeddings=8, num_labels=3, **small, **tiny
    )
    words = torch.randint(3, 19, (12, 8), generator=torch.Generator().manual_seed(1))
    names = []
    for config, head, auto in (
        (gpt2, transformers.GPT2LMHeadModel, transformers.AutoModelForCausalLM),
        (bert, transformers.BertForSequenceClassification, None),
    ):
        torch.manual_seed(0)
        model = head(config).train()
        stepper = lockstep.Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        run = folder / config.model_type
        checkpoints = lockstep.Checkpoints(run / "checkpoints", stepper, every=2)
        loader = lockstep.Loader(TensorDataset(words), global_batch=6, micro_batch=3)
        for window in next(iter(loader.epochs(1))):
            for (x,) in stepper.micro_batches(window):
                stepper.backward(model(x).logits.square().sum(), len(x))
            stepper.step()
            checkpoints.step()
        checkpoints.close()
        out = folder / f"exported {config.model_type}"
        called = CliRunner().invoke(
            app, ["export", str(run), "--format", "hf", "--out", str(out)], catch_exceptions=False
        )
        assert called.exit_code == 0, called.output
        read, found = (auto or head).from_pretrained(out, output_loading_info=True)
        assert not any(found.values()), found
        assert type(read) is head
        torch.testing.assert_close(
            read.eval()(words).logits, model.eval()(words).logits, rtol=0, atol=0
        )
        weights = load_file(out / "model.safetensors")
        with safe_open(out / "model.safetensors", framework="pt") as header:
            assert header.metadata()["format"] == "pt"
        head(config).load_state_dict(weights)  # strict
        names.append(sorted(weights))
        assert json.loads((out / "config.json").read_text())["architectures"] == [head.__name__]
    return names


def test_models_of_transformers_come_back_by_from_pretrained(tmp_path: Path) -> None:
    """In a rank: transformers takes seconds and much memory."""
    ((gpt2, bert),) = run_ranks(trains_and_exports, 1, (tmp_path,))
    assert {"lm_head.weight", "transformer.wte.weight"} <= set(gpt2)
    assert "bert.embeddings.word_embeddings.weight" in bert
