"""The models and devices of `lockstep plan --model`. Their constants are in models.toml, each with
its source.

A model is a list of layers in the order of the forward, each with its parameters and FLOPs: those
of matrices, convolutions and attention. For the backward of a convolution, its input is kept, and
the input of the batch normalisation behind it.

A device has peak rates and memory from the vendor's data sheet, and achieved rates from published
throughputs of one device or one host. An achieved rate belongs to a device and a family of models,
not to one model: it is the median of the published values for the family. It is the throughput
times the FLOPs of forward and backward (three forwards), so it includes all losses of a framework.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from lockstep.config.knob import chosen

Family = Literal["convolutional", "plain convolutional", "transformer"]
"""The family of a model determines which share of its peak a device achieves. Plain: stacks of 3x3
convolutions, for which fast algorithms save multiplications.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLayer:
    """One layer. Its gradients are ready when the backward has passed it, so those of the last
    layer are ready first.
    """

    parameters: int
    flops: float
    """FLOPs of the forward for one sample; a multiplication and an addition are two."""
    kept: float
    """Elements that the forward keeps for the backward, for one sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """One row of the table of models."""

    name: str
    family: Family
    layers: tuple[ModelLayer, ...]
    batch: int
    """Samples per device and step, as in published trainings."""
    tokens: int = 1
    """Tokens of a sample: its sequence length; 1 if a sample is an image."""
    blocks: int = 0
    """Number of equal layers, which a pipeline divides into stages, and whose matrices tensor
    parallelism splits; 0 if there are none.
    """
    width: int = 0
    """Elements that one block passes to the next for one token."""

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOPs of the forward for one sample."""
        return sum(layer.flops for layer in self.layers)

    @property
    def kept(self) -> float:
        """Elements kept for the backward, for one sample."""
        return sum(layer.kept for layer in self.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSizes:
    """Sizes of a decoder or an encoder; `length` in tokens."""

    blocks: int
    width: int
    feed_forward: int
    vocabulary: int
    length: int
    heads: int
    head: int | None = None
    """Width of one head; default: width / heads."""
    key_value_heads: int | None = None
    """Fewer than `heads` if heads share keys and values; default: `heads`."""
    gated: bool = False
    """Whether a feed-forward layer has three matrices (SwiGLU) in place of two."""
    biases: bool = True
    positions: int = 0
    """Number of learned position embeddings."""
    tied: bool = True
    """Whether the output layer shares the embedding's weights. Their gradient is then complete
    last, when the backward reaches the embedding.
    """


def transformer(sizes: TransformerSizes) -> tuple[ModelLayer, ...]:
    """Return the embedding, the blocks and the output layer. FLOPs are those of matrices, and of
    attention over all pairs of tokens: a causal mask does not reduce them.
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


def _block(sizes: TransformerSizes) -> ModelLayer:
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


def _kept(sizes: TransformerSizes, inner: int, shared: int) -> float:
    """Return the elements that a block keeps: the inputs of its matrices, norms and nonlinearity.
    Fused attention keeps no scores.

    After Korthikanti et al., 2022 (arXiv 2205.05198), equation 1, without the term of the scores
    and without dropout's masks.
    """
    # residual and the norm's output; q; k and v; attention's output
    attention = 2 * sizes.width + inner + 2 * shared + inner
    feed_forward = 2 * sizes.width + (3 if sizes.gated else 2) * sizes.feed_forward
    return float(sizes.length * (attention + feed_forward))


def vgg16() -> tuple[ModelLayer, ...]:
    """Return VGG-16: Simonyan and Zisserman, 2014 (arXiv 1409.1556), table 1, column D. The linear
    layers, first in a backward, hold 89 % of the parameters.
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
    """Return a ResNet with bottlenecks: He et al., 2015 (arXiv 1512.03385), table 1. The stride is
    in the 3x3 convolution, as in torchvision (v1.5).
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
    """Return Inception v3: Szegedy et al., 2015 (arXiv 1512.00567), table 1 and figures 5-7,
    without the auxiliary head.
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
    """Return branches of 1x1, 5x5, two 3x3, and pooling."""
    five = ((1, channels, 48, 35), (25, 48, 64, 35))
    threes = ((1, channels, 64, 35), (9, 64, 96, 35), (9, 96, 96, 35))
    return _branches((1, channels, 64, 35), *five, *threes, (1, channels, pooled, 35))


def _inception_17(inner: int) -> ModelLayer:
    """Return branches of 1x1, one pair and two pairs of 1x7 and 7x1, and pooling."""
    pair = ((1, 768, inner, 17), (7, inner, inner, 17), (7, inner, 192, 17))
    pairs = ((1, 768, inner, 17), *((7, inner, inner, 17),) * 3, (7, inner, 192, 17))
    return _branches((1, 768, 192, 17), *pair, *pairs, (1, 768, 192, 17))


def _inception_8(channels: int) -> ModelLayer:
    """Return branches of 1x1, a 3x3 split into 1x3 and 3x1, the same after another 3x3, and
    pooling.
    """
    split = ((1, channels, 384, 8), (3, 384, 384, 8), (3, 384, 384, 8))
    deeper = ((1, channels, 448, 8), (9, 448, 384, 8), (3, 384, 384, 8), (3, 384, 384, 8))
    return _branches((1, channels, 320, 8), *split, *deeper, (1, channels, 192, 8))


def _branches(*convolutions: tuple[int, int, int, int]) -> ModelLayer:
    return _together(*(_convolution(*sizes) for sizes in convolutions))


def _convolution(area: int, ins: int, outs: int, side: int, normalised: bool = True) -> ModelLayer:
    """Return a convolution. `area`: elements of the kernel; `side`: width and height of the output.
    If normalised, it has two parameters per channel instead of a bias, and keeps its output twice.
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


_TABLES = tomllib.loads(files("lockstep.tools.plan").joinpath("models.toml").read_text("utf-8"))


def _transformer(name: str, sizes: TransformerSizes, batch: int) -> Model:
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
        # Images per device: 64 in the TensorFlow benchmarks of May 2017 and in Horovod's; 32 in
        # Goyal et al., 2017 (use --batch).
        Model(name="resnet50", family="convolutional", layers=resnet((3, 4, 6, 3)), batch=64),
        Model(name="resnet101", family="convolutional", layers=resnet((3, 4, 23, 3)), batch=64),
        Model(name="inception-v3", family="convolutional", layers=inception_v3(), batch=64),
        Model(name="vgg16", family="plain convolutional", layers=vgg16(), batch=64),
        *(
            _transformer(name, TransformerSizes(**each["sizes"]), each["batch"])
            for name, each in _TABLES["transformers"].items()
        ),
    )
}


def model_named(name: str) -> Model:
    """Return the model. Raises UsageError if it is not in the table."""
    chosen("model", name.lower(), MODELS)
    return MODELS[name.lower()]


# Bytes in a gigabyte of memory on a data sheet.
_GB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device. Rates are in FLOP/s, without sparsity."""

    name: str
    fp32: float
    half: float
    """Peak in 16-bit floating point with 32-bit sums."""
    memory: int
    """Bytes of memory."""
    mixed: bool
    """Whether the achieved rates are for mixed precision: 16 bits in forward and backward, 32 in
    the optimizer. Otherwise they are for fp32.
    """
    achieved: Mapping[Family, float]
    """Achieved FLOP/s. The time of the optimizer is included, as in the published throughputs."""


def _device(name: str, found: dict[str, Any]) -> Device:
    peak = found["half" if found["mixed"] else "fp32"]
    rates = {family: peak * share for family, share in found["achieved"].items()}
    return Device(**{**found, "name": name, "memory": found["memory"] * _GB, "achieved": rates})


DEVICES = {name: _device(name, found) for name, found in _TABLES["devices"].items()}


def device_named(name: str) -> Device:
    """Return the device. Raises UsageError if it is not in the table."""
    chosen("device", name.lower(), DEVICES)
    return DEVICES[name.lower()]
