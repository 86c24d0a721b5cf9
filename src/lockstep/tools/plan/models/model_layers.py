"""A model as a plan sees it: pieces in the order of the forward, each with its parameters and
its work; and transformers, from their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
