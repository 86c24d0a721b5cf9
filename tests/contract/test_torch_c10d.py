"""PyTorch's own tests of its collectives pass over the backend where they pass over gloo, but
for the table in the guide.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide" / "one-host.md"

# Skipped (more ranks, a GPU, another library) or failing there as well: gloo has no all_to_all of
# different sizes, for one.
NOT_OVER_GLOO = {
    "test_1_level_hierarchical_model_averager_equivalent_to_periodic_model_averager",
    "test_3_level_hierarchical_model_averager",
    "test_SyncBatchNorm_process_group",
    "test_all_gather_coalesced_group",
    "test_all_gather_group",
    "test_all_gather_into_stack_tensor_cuda",
    "test_all_gather_v_cuda",
    "test_all_reduce_coalesced_group_max",
    "test_all_reduce_coalesced_group_min",
    "test_all_reduce_coalesced_group_product",
    "test_all_reduce_coalesced_group_sum",
    "test_all_reduce_group_max",
    "test_all_reduce_group_min",
    "test_all_reduce_group_product",
    "test_all_reduce_group_sum",
    "test_all_to_all",
    "test_all_to_all_complex",
    "test_all_to_all_cuda",
    "test_all_to_all_cuda_complex",
    "test_all_to_all_full_group",
    "test_all_to_all_full_group_cuda",
    "test_all_to_all_group",
    "test_all_to_all_group_cuda",
    "test_all_to_all_single_equal_split_group",
    "test_all_to_all_single_equal_split_group_cuda",
    "test_all_to_all_single_unequal_split_group",
    "test_all_to_all_single_unequal_split_group_cuda",
    "test_average_parameters",
    "test_barrier_full_group_cuda",
    "test_barrier_group",
    "test_barrier_group_cuda",
    "test_barrier_timeout_arg",
    "test_barrier_timeout_global",
    "test_barrier_timeout_group",
    "test_batch_isend_irecv_mixed_backend_err",
    "test_broadcast_group",
    "test_broadcast_object_list",
    "test_coalescing_manager",
    "test_coalescing_manager_async",
    "test_gather_group",
    "test_monitored_barrier_allreduce_hang",
    "test_monitored_barrier_allreduce_hang_wait_all_ranks",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_wait_all_ranks",
    "test_new_subgroups",
    "test_new_subgroups_by_enumeration",
    "test_new_subgroups_by_enumeration_input_rank_exceeds_world_size",
    "test_new_subgroups_by_enumeration_negative_input_rank",
    "test_new_subgroups_group_size_exceeds_world_size",
    "test_new_subgroups_overlap_not_allowed",
    "test_new_subgroups_with_group_param",
    "test_new_subgroups_world_size_not_divisible_by_group_size",
    "test_periodic_model_averager",
    "test_periodic_model_averager_param_group",
    "test_reduce_group_max",
    "test_reduce_group_min",
    "test_reduce_group_product",
    "test_reduce_group_sum",
    "test_reduce_scatter_tensor_cuda",
    "test_scatter_group",
}


def different() -> set[str]:
    """The bodies that the guide says stay different."""
    return set(re.findall(r"^\| `(test_\w+)` \|", GUIDE.read_text(), re.MULTILINE))


def test_torchs_own_tests_pass_but_for_the_table_in_the_guide(tmp_path: Path) -> None:
    """Takes a minute or two: 108 of PyTorch's tests, on ranks of its own."""
    out = tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "tests.contract.torch_c10d",
        out,
        "--but",
        *sorted(NOT_OVER_GLOO),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    found: dict[str, str] = json.loads(out.read_text())
    assert len(found) == 108
    fail = {name: outcome for name, outcome in found.items() if outcome != "passed"}
    assert set(fail) == different(), "\n\n".join(
        f"{name}\n{outcome}" for name, outcome in fail.items() if name not in different()
    )
