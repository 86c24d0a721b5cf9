"""How this process computes within a training."""

from __future__ import annotations

from contextlib import suppress

import torch

from lockstep.config.task import Precision
from lockstep.training.opening import grad_scaler, matmul_precision

CPU = torch.device("cpu")


def test_only_fp16_scales() -> None:
    precisions: list[Precision] = ["fp32", "bf16", "fp16", "tf32"]
    scalers = [grad_scaler(precision, CPU) for precision in precisions]
    assert [scaler is not None for scaler in scalers] == [False, False, True, False]


def test_tf32_is_put_back_also_after_an_exception() -> None:
    before = torch.get_float32_matmul_precision()
    with suppress(ZeroDivisionError), matmul_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before
    with matmul_precision("fp32"):
        assert torch.get_float32_matmul_precision() == before
