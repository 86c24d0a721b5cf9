"""A model as a plan sees it: pieces in the order of the forward, each with its parameters and its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["convolutional", "plain convolutional", "transformer"]
"""What decides which share of its peak a device achieves. Plain: stacks of 3x3 convolutions, for which fast algorithms save multiplications."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Gradients of a layer are ready when the backward has passed it, so a backward frees the last layer first."""

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
    layers: tuple[Layer, ...]
    batch: int
    """Samples for one device and step, as published trainings have them."""
    tokens: int = 1
    """Of a sample: its sequence length; 1 where a sample is an image."""
    blocks: int = 0
    """Equal layers between which a pipeline can cut, and whose matrices tensor parallelism splits; 0 where there are none."""
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
