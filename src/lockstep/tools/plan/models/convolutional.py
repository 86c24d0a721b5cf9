"""The convolutional networks of the published scaling results, from the architectures in their
papers.

Work is that of convolutions and linear layers. Kept for the backward: the input of each, and of
each batch normalisation behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.tools.plan.models.model_layers import ModelLayer


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
        _block((9, 288, 384, 17), (1, 288, 64, 35), (9, 64, 96, 35), (9, 96, 96, 17)),
        *(_inception_17(inner) for inner in (128, 160, 160, 192)),
        _block(
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
    return _block((1, channels, 64, 35), *five, *threes, (1, channels, pooled, 35))


def _inception_17(inner: int) -> ModelLayer:
    """Branches of 1x1, one pair and two pairs of 1x7 and 7x1, and pooling."""
    pair = ((1, 768, inner, 17), (7, inner, inner, 17), (7, inner, 192, 17))
    pairs = ((1, 768, inner, 17), *((7, inner, inner, 17),) * 3, (7, inner, 192, 17))
    return _block((1, 768, 192, 17), *pair, *pairs, (1, 768, 192, 17))


def _inception_8(channels: int) -> ModelLayer:
    """Branches of 1x1, a 3x3 split into 1x3 and 3x1, the same behind another 3x3, and pooling."""
    split = ((1, channels, 384, 8), (3, 384, 384, 8), (3, 384, 384, 8))
    deeper = ((1, channels, 448, 8), (9, 448, 384, 8), (3, 384, 384, 8), (3, 384, 384, 8))
    return _block((1, channels, 320, 8), *split, *deeper, (1, channels, 192, 8))


def _block(*convolutions: tuple[int, int, int, int]) -> ModelLayer:
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
