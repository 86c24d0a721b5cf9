"""PyTorch's own DDP tests pass with our class, but for the table in the guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import ranks

pytestmark = pytest.mark.rest

NEEDS_A_GPU = [
    r"test_DistributedDataParallel_SyncBatchNorm.*",
    r"test_ddp_(device|inference|logging_data_gpu|native_mixed_precision_(?!ignored).*)",
    r"test_ddp_apply_optim_in_backward(_grad_as_bucket_view_false|_ignored_params)?",
    r"test_ddp_uneven_inputs_stop_iteration_sync_bn|test_sync_bn_logged",
    r"test_post_localSGD_optimizer_parity_with_hierarchical_sgd(_grad_is_view)?",
]
AN_HOUR_ON_A_CPU = ["test_ddp_uneven_inputs"]  # joins are in test_wrapper.py
TORCH_DOES_NOT_RUN_THEM = [
    "test_DistributedDataParallel",
    "test_DistributedDataParallel_non_default_stream",
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
    "test_ddp_has_finalized",
    "test_ddp_hook_pickling_powerSGD",  # fails with torch's class too: torch.load refuses the hook
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_profiling_autograd_profiler",
    "test_ddp_profiling_execution_trace",
    "test_ddp_sync_bn_training_vs_eval",
]


def test_torchs_own_tests_pass_but_for_the_table_in_the_guide(tmp_path: Path) -> None:
    """Takes a minute: more than 60 of PyTorch's tests, on ranks of its own."""
    left_out = NEEDS_A_GPU + AN_HOUR_ON_A_CPU + TORCH_DOES_NOT_RUN_THEM
    outcomes = ranks.outcomes_of("torch_ddp", tmp_path / "out.json", "--but", *left_out)
    assert len(outcomes) > 60
    ranks.check(outcomes, "torch-ddp.md")
