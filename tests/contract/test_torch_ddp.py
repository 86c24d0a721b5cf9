"""PyTorch's own DDP tests pass with our class, but for the table in the guide."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide" / "torch-ddp.md"

NEEDS_A_GPU = {
    *(
        f"test_DistributedDataParallel_SyncBatchNorm{kind}"
        for kind in (
            "",
            "_2D_Input",
            "_Channels_Last",
            "_Diff_Input_Sizes_Running_Value",
            "_Diff_Input_Sizes_gradient",
            "_No_Affine",
            "_Single_Input_Per_Process",
            "_half",
        )
    ),
    "test_ddp_apply_optim_in_backward",
    "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_device",
    "test_ddp_inference",
    "test_ddp_logging_data_gpu",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    "test_ddp_uneven_inputs_stop_iteration_sync_bn",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_sync_bn_logged",
}
AN_HOUR_ON_A_CPU = {"test_ddp_uneven_inputs"}  # its small models are a body of ours
TORCH_DOES_NOT_RUN_THEM = {
    "test_DistributedDataParallel",
    "test_DistributedDataParallel_non_default_stream",
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
    "test_ddp_has_finalized",
    "test_ddp_hook_pickling_powerSGD",  # fails with torch's class too: torch.load refuses the hook
    "test_ddp_model_diff_shape_across_ranks",
    "test_ddp_profiling_autograd_profiler",
    "test_ddp_profiling_execution_trace",
    "test_ddp_sync_bn_training_vs_eval",
}


def different() -> set[str]:
    """The bodies that the guide says stay different."""
    return set(re.findall(r"^\| `(test_\w+)` \|", GUIDE.read_text(), re.MULTILINE))


def test_torchs_own_tests_pass_but_for_the_table_in_the_guide(tmp_path: Path) -> None:
    """Takes a minute: more than 60 of PyTorch's tests, on ranks of its own."""
    out = tmp_path / "found.json"
    left_out = sorted(NEEDS_A_GPU | AN_HOUR_ON_A_CPU | TORCH_DOES_NOT_RUN_THEM)
    subprocess.run(
        [sys.executable, "-m", "tests.contract.torch_ddp", out, "--but", *left_out],
        cwd=ROOT,
        check=True,
    )
    found: dict[str, str] = json.loads(out.read_text())
    assert len(found) > 60
    fail = {name: outcome for name, outcome in found.items() if outcome != "passed"}
    assert set(fail) == different(), "\n\n".join(
        f"{name}\n{outcome}" for name, outcome in fail.items() if name not in different()
    )
