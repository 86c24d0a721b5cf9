"""The tables of `lockstep plan --model`: models and devices. Constants, each with its source, and
nothing fitted to anybody's scaling results.

A model is pieces in the order of the forward, each with its parameters and its work. Work is that of
matrices, convolutions and attention. Kept for the backward of a convolution: its input, and that of
each batch normalisation behind it.

A device has peaks and memory from the vendor's data sheet, and achieved rates from published
single-device (or single-host) throughputs. An achieved rate belongs to a device and a family of
models, not to a model: the median of what was published for that family. It is the throughput times
the work of forward and backward (three forwards), so whatever a framework loses is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.config.knob import chosen

Family = Literal["convolutional", "plain convolutional", "transformer"]
"""What decides which share of its peak a device achieves. Plain: stacks of 3x3 convolutions, for
which fast algorithms save multiplications.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLayer:
    """Gradients of a layer are ready when the backward has passed it, so a backward frees the
    last layer first.
    """

    parameters: int
    flops: float
    """Of the forward, for one sample; a multiplication and an addition are two."""
    kept: float
    """Elements that the forward keeps for the backward, for one sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One row of the table of models."""

    name: str
    family: Family
    layers: tuple[ModelLayer, ...]
    batch: int
    """Samples for one device and step, as published trainings have them."""
    tokens: int = 1
    """Of a sample: its sequence length; 1 where a sample is an image."""
    blocks: int = 0
    """Equal layers between which a pipeline can cut, and whose matrices tensor parallelism
    splits; 0 where there are none.
    """
    width: int = 0
    """Elements that go from one block to the next for one token."""

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """Of the forward, for one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def kept(self) -> float:
        """Elements kept for the backward, for one sample."""
        return sum(layer.kept for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of a decoder or an encoder; `length` in tokens."""

    blocks: int
    width: int
    feed_forward: int
    vocabulary: int
    length: int
    heads: int
    head: int | None = None
    """Of one head; default: width / heads."""
    key_value_heads: int | None = None
    """Fewer than `heads` where heads share keys and values; default: `heads`."""
    gated: bool = False
    """A feed-forward layer of three matrices (SwiGLU) in place of two."""
    biases: bool = True
    positions: int = 0
    """Learned position embeddings."""
    tied: bool = True
    """The output layer is the embedding: its gradient is complete when the backward reaches the
    embedding, last of all.
    """


def transformer(sizes: Sizes) -> tuple[ModelLayer, ...]:
    """The embedding, the blocks, the output layer. Work: matrices, and attention over all pairs
    of tokens (nothing taken off for a causal mask).
    """
    table = sizes.vocabulary * sizes.width
    embedding = ModelLayer(
        parameters=table + sizes.positions * sizes.width,
        flops=0.0,
        kept=float(sizes.length * sizes.width),
    )
    head = ModelLayer(
        parameters=(0 if sizes.tied else table) + (2 if sizes.biases else 1) * sizes.width,
        flops=2.0 * table * sizes.length,
        kept=float(sizes.length * (sizes.vocabulary + sizes.width)),
    )
    return (embedding, *(_block(sizes),) * sizes.blocks, head)


def _block(sizes: Sizes) -> ModelLayer:
    inner = sizes.heads * (sizes.head or sizes.width // sizes.heads)
    shared = inner * (sizes.key_value_heads or sizes.heads) // sizes.heads
    matrices = (
        sizes.width * (2 * inner + 2 * shared)
        + (3 if sizes.gated else 2) * sizes.width * sizes.feed_forward
    )
    biases = inner + 2 * shared + 2 * sizes.width + sizes.feed_forward if sizes.biases else 0
    norms = (4 if sizes.biases else 2) * sizes.width
    attention = 2.0 * 2.0 * sizes.length**2 * inner  # scores, and their product with the values
    return ModelLayer(
        parameters=matrices + biases + norms,
        flops=2.0 * matrices * sizes.length + attention,
        kept=_kept(sizes, inner, shared),
    )


def _kept(sizes: Sizes, inner: int, shared: int) -> float:
    """Elements that a block keeps with fused attention, which keeps no scores: the inputs of its
    matrices, norms and of the nonlinearity.

    After Korthikanti et al., 2022 (arXiv 2205.05198), equation 1, without the term of the scores
    and without dropout's masks.
    """
    # residual, norm's output; q, k, v; attention's output
    attention = 2 * sizes.width + inner + 2 * shared + inner
    feed_forward = 2 * sizes.width + (3 if sizes.gated else 2) * sizes.feed_forward
    return float(sizes.length * (attention + feed_forward))


def vgg16() -> tuple[ModelLayer, ...]:
    """Simonyan and Zisserman, 2014 (arXiv 1409.1556), table 1, column D. The linear layers,
    first in a backward, hold 89 % of the parameters.
    """
    layers, channels = [], 3
    for side, outs in (
        (224, (64, 64)),
        (112, (128, 128)),
        (56, (256,) * 3),
        (28, (512,) * 3),
        (14, (512,) * 3),
    ):
        for out in outs:
            layers.append(_convolution(9, channels, out, side, normalised=False))
            channels = out
    return (*layers, _linear(512 * 7 * 7, 4096), _linear(4096, 4096), _linear(4096, 1000))


def resnet(blocks: Sequence[int]) -> tuple[ModelLayer, ...]:
    """He et al., 2015 (arXiv 1512.03385), table 1, with bottlenecks; the stride in the 3x3
    convolution, as torchvision has it (v1.5).
    """
    layers, channels, before = [_convolution(49, 3, 64, 112)], 64, 56
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        for block in range(count):
            first = _convolution(1, channels, width, before)
            second = _convolution(9, width, width, side)
            third = _convolution(1, width, 4 * width, side)
            shortcut = [_convolution(1, channels, 4 * width, side)] if block == 0 else []
            layers.append(_together(first, second, third, *shortcut))
            channels, before = 4 * width, side
    return (*layers, _linear(channels, 1000))


def inception_v3() -> tuple[ModelLayer, ...]:
    """Szegedy et al., 2015 (arXiv 1512.00567), table 1 and figures 5-7, without the auxiliary
    head.
    """
    stem = [
        _convolution(*sizes)
        for sizes in (
            (9, 3, 32, 149),
            (9, 32, 32, 147),
            (9, 32, 64, 147),
            (1, 64, 80, 73),
            (9, 80, 192, 71),
        )
    ]
    return (
        *stem,
        *(
            _inception_35(channels, pooled)
            for channels, pooled in ((192, 32), (256, 64), (288, 64))
        ),
        _branches((9, 288, 384, 17), (1, 288, 64, 35), (9, 64, 96, 35), (9, 96, 96, 17)),
        *(_inception_17(inner) for inner in (128, 160, 160, 192)),
        _branches(
            (1, 768, 192, 17),
            (9, 192, 320, 8),
            (1, 768, 192, 17),
            (7, 192, 192, 17),
            (7, 192, 192, 17),
            (9, 192, 192, 8),
        ),
        *(_inception_8(channels) for channels in (1280, 2048)),
        _linear(2048, 1000),
    )


def _inception_35(channels: int, pooled: int) -> ModelLayer:
    """Branches of 1x1, 5x5, two 3x3, and pooling."""
    five = ((1, channels, 48, 35), (25, 48, 64, 35))
    threes = ((1, channels, 64, 35), (9, 64, 96, 35), (9, 96, 96, 35))
    return _branches((1, channels, 64, 35), *five, *threes, (1, channels, pooled, 35))


def _inception_17(inner: int) -> ModelLayer:
    """Branches of 1x1, one pair and two pairs of 1x7 and 7x1, and pooling."""
    pair = ((1, 768, inner, 17), (7, inner, inner, 17), (7, inner, 192, 17))
    pairs = ((1, 768, inner, 17), *((7, inner, inner, 17),) * 3, (7, inner, 192, 17))
    return _branches((1, 768, 192, 17), *pair, *pairs, (1, 768, 192, 17))


def _inception_8(channels: int) -> ModelLayer:
    """Branches of 1x1, a 3x3 split into 1x3 and 3x1, the same behind another 3x3, and pooling."""
    split = ((1, channels, 384, 8), (3, 384, 384, 8), (3, 384, 384, 8))
    deeper = ((1, channels, 448, 8), (9, 448, 384, 8), (3, 384, 384, 8), (3, 384, 384, 8))
    return _branches((1, channels, 320, 8), *split, *deeper, (1, channels, 192, 8))


def _branches(*convolutions: tuple[int, int, int, int]) -> ModelLayer:
    return _together(*(_convolution(*sizes) for sizes in convolutions))


def _convolution(area: int, ins: int, outs: int, side: int, normalised: bool = True) -> ModelLayer:
    """`area` of the kernel, `side` of the output. Normalised ones have two parameters a channel
    in place of a bias, and keep their output twice.
    """
    weights = area * ins * outs
    own = 2 * outs if normalised else outs
    return ModelLayer(
        parameters=weights + own,
        flops=2.0 * weights * side**2,
        kept=(2 if normalised else 1) * outs * side**2,
    )


def _linear(ins: int, outs: int) -> ModelLayer:
    return ModelLayer(parameters=ins * outs + outs, flops=2.0 * ins * outs, kept=outs)


def _together(*layers: ModelLayer) -> ModelLayer:
    return ModelLayer(
        parameters=sum(layer.parameters for layer in layers),
        flops=sum(layer.flops for layer in layers),
        kept=sum(layer.kept for layer in layers),
    )


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
    chosen("model", name.lower(), MODELS)
    return MODELS[name.lower()]


# Bytes of memory that a data sheet's gigabytes are.
_GB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Rates in FLOP/s, without sparsity."""

    name: str
    fp32: float
    half: float
    """Peak in 16-bit floating point with sums in 32 bits."""
    memory: int
    """Bytes."""
    mixed: bool
    """Whether the achieved rates are those of mixed precision: 16 bits in the forward and
    backward, 32 in the optimizer. Else all is fp32.
    """
    achieved: Mapping[Family, float]
    """FLOP/s. The optimizer's part of a step is in it, as it is in the throughputs."""


def _peak(rate: float, shares: Mapping[Family, float]) -> dict[Family, float]:
    return {family: rate * share for family, share in shares.items()}


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA P100 data sheet (SXM2). fp32: its published trainings are in fp32. Convolutions:
        # TensorFlow benchmarks, May 2017 (docs_src/performance/benchmarks.md), synthetic, batch 64,
        # one GPU: Inception V3 142, ResNet-50 219, ResNet-152 91.8 images/s: 0.46, 0.51, 0.60 of
        # the peak. VGG-16 154 images/s: 1.35 of it (Winograd's algorithm). Transformer: Vaswani et
        # al., 2017 (arXiv 1706.03762), section 5.2: the big model, 1.0 s a step of 25,000 + 25,000
        # tokens on 8 GPUs.
        Device(
            name="p100",
            fp32=10.6e12,
            half=21.2e12,
            memory=16 * _GB,
            mixed=False,
            achieved=_peak(
                10.6e12, {"convolutional": 0.51, "plain convolutional": 1.35, "transformer": 0.38}
            ),
        ),
        # NVIDIA V100 data sheet (SXM2, 32 GB). Mixed precision. Convolutions: NVIDIA
        # DeepLearningExamples, ResNet-50 v1.5 for PyTorch, one V100 32 GB, mixed: 1156 images/s:
        # 0.23 of the peak. Transformer: Shoeybi et al., 2019 (arXiv 1909.08053), abstract: 39
        # TFLOP/s on one GPU. Plain: no published figure found; the convolutional one.
        Device(
            name="v100",
            fp32=15.7e12,
            half=125e12,
            memory=32 * _GB,
            mixed=True,
            achieved=_peak(
                125e12, {"convolutional": 0.23, "plain convolutional": 0.23, "transformer": 0.31}
            ),
        ),
        # NVIDIA Ada architecture white paper, appendix A (GeForce RTX 4090, fp16 with fp32 sums).
        # Convolutions: server-gear.com, tf_cnn_benchmarks, one RTX 4090, fp16: ResNet-50 1776,
        # Inception V3 1340 images/s: 0.26, 0.28. Transformer: karpathy/nanoGPT issue 182: GPT-2
        # 124M at 29 % of an A100's 312 TFLOP/s: 0.55 of this peak. Plain: no published figure
        # found; the convolutional one.
        Device(
            name="rtx4090",
            fp32=82.6e12,
            half=165.2e12,
            memory=24 * _GB,
            mixed=True,
            achieved=_peak(
                165.2e12, {"convolutional": 0.27, "plain convolutional": 0.27, "transformer": 0.55}
            ),
        ),
        # NVIDIA A100 data sheet (SXM, 80 GB). Convolutions: NVIDIA DeepLearningExamples, ResNet-50
        # v1.5 for PyTorch, one A100 80 GB, mixed: 2470 images/s: 0.19. Transformer: llm-foundry,
        # scripts/train/benchmarking, one host of 8, 2048 tokens, no checkpointing of activations:
        # 1b 0.599, 3b 0.621, 7b 0.642, 13b 0.596. What its all-gathers inside the host cost is in
        # it. Plain: no published figure found; the convolutional one.
        Device(
            name="a100-80g",
            fp32=19.5e12,
            half=312e12,
            memory=80 * _GB,
            mixed=True,
            achieved=_peak(
                312e12, {"convolutional": 0.19, "plain convolutional": 0.19, "transformer": 0.61}
            ),
        ),
        # NVIDIA H100 data sheet (SXM). Convolutions: no published single-device figure found. In
        # mixed precision they are bound by memory: V100 and A100 give 1284 and 1211 images/s per
        # TB/s (0.90 and 2.04 TB/s); A100's times 3.35 TB/s is 0.10 of this peak. Transformer:
        # llm-foundry, as above: 1b 0.418, 7b 0.464, 13b 0.398.
        Device(
            name="h100",
            fp32=67e12,
            half=989e12,
            memory=80 * _GB,
            mixed=True,
            achieved=_peak(
                989e12, {"convolutional": 0.10, "plain convolutional": 0.10, "transformer": 0.42}
            ),
        ),
        # NVIDIA H200 data sheet (SXM): H100's processors with more and faster memory (4.8 TB/s).
        # Convolutions by memory, as above; transformers as H100.
        Device(
            name="h200",
            fp32=67e12,
            half=989e12,
            memory=141 * _GB,
            mixed=True,
            achieved=_peak(
                989e12, {"convolutional": 0.14, "plain convolutional": 0.14, "transformer": 0.42}
            ),
        ),
    )
}


def device_named(name: str) -> Device:
    """Raises UsageError for one that is not in the table."""
    chosen("device", name.lower(), DEVICES)
    return DEVICES[name.lower()]
