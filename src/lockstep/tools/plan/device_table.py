"""The table of devices: peaks and memory from the vendor's data sheets, achieved rates from
published single-device (or single-host) throughputs.

An achieved rate belongs to a device and a family of models, not to a model: median of what was
published for that family. It is the throughput times the work of forward and backward (three
forwards), so whatever a framework loses is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.knob import chosen
from lockstep.tools.plan.model_table import Family

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
