"""The table of models that `lockstep plan --model` knows: constants, each with its source, and
nothing fitted to anybody's scaling results.
"""

from __future__ import annotations

from lockstep.errors import UsageError
from lockstep.tools.plan.models.convolutional import inception_v3, resnet, vgg16
from lockstep.tools.plan.models.model_layers import Model, Sizes, transformer

# Devlin et al., 2018 (arXiv 1810.04805), section 3; 512 tokens are its second phase's.
_BERT_LARGE = Sizes(
    blocks=24, width=1024, feed_forward=4096, vocabulary=30_522, length=512, heads=16, positions=514
)
# Radford et al., 2019, table 2, and the released configuration of the model with 1.5 billion
# parameters.
_GPT2_XL = Sizes(
    blocks=48,
    width=1600,
    feed_forward=6400,
    vocabulary=50_257,
    length=1024,
    heads=25,
    positions=1024,
)
# Grattafiori et al., 2024 (arXiv 2407.21783), table 3; 8192 tokens are those of its pre-training.
_LLAMA_8B = Sizes(
    blocks=32,
    width=4096,
    feed_forward=14_336,
    vocabulary=128_256,
    length=8192,
    heads=32,
    key_value_heads=8,
    gated=True,
    biases=False,
    tied=False,
)
# Brown et al., 2020 (arXiv 2005.14165), table 2.1 and section 2.1.
_GPT3_175B = Sizes(
    blocks=96,
    width=12_288,
    feed_forward=49_152,
    vocabulary=50_257,
    length=2048,
    heads=96,
    positions=2048,
)
# Chowdhery et al., 2022 (arXiv 2204.02311), table 1 and section 2: SwiGLU, one key and value for
# all heads, no biases, shared embeddings.
_PALM_540B = Sizes(
    blocks=118,
    width=18_432,
    feed_forward=73_728,
    vocabulary=256_000,
    length=2048,
    heads=48,
    head=256,
    key_value_heads=1,
    gated=True,
    biases=False,
)


def _transformer(name: str, sizes: Sizes, *, batch: int) -> Model:
    return Model(
        name=name,
        family="transformer",
        layers=transformer(sizes),
        batch=batch,
        tokens=sizes.length,
        blocks=sizes.blocks,
        width=sizes.width,
    )


MODELS = {
    model.name: model
    for model in (
        # Images a device: 64 in the TensorFlow benchmarks of May 2017 and in Horovod's; 32 in Goyal
        # et al., 2017 (given as --batch).
        Model(name="resnet50", family="convolutional", layers=resnet((3, 4, 6, 3)), batch=64),
        Model(name="resnet101", family="convolutional", layers=resnet((3, 4, 23, 3)), batch=64),
        Model(name="inception-v3", family="convolutional", layers=inception_v3(), batch=64),
        Model(name="vgg16", family="plain convolutional", layers=vgg16(), batch=64),
        # Sequences a device: what fits beside 16 bytes a parameter, or what the model's paper or
        # benchmark has where that is known.
        _transformer("bert-large", _BERT_LARGE, batch=8),
        _transformer("gpt2-xl", _GPT2_XL, batch=4),
        _transformer("llama-8b", _LLAMA_8B, batch=2),  # torchtitan, December 2024
        _transformer("gpt3-175b", _GPT3_175B, batch=1),
        _transformer("palm-540b", _PALM_540B, batch=1),
    )
}


def model_named(name: str) -> Model:
    """Raises UsageError for one that is not in the table."""
    if name.lower() not in MODELS:
        raise UsageError(
            f"--model {name} is unknown: choose one of {', '.join(MODELS)}, or plan a task of your"
            " own: lockstep plan TASK"
        )
    return MODELS[name.lower()]
