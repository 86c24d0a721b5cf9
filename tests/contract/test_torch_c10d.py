"""PyTorch's own tests of its collectives pass over the backend where they pass over gloo, but
for the table in the guide.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import ranks

pytestmark = pytest.mark.rest

# Skipped (more ranks, a GPU, another library) or failing there as well: gloo has no all_to_all of
# different sizes, for one.
NOT_OVER_GLOO = [
    r"test_all_gather_(into_stack_tensor|v)_cuda",
    r"test_all_to_all(?!_single).*",
    r"test_all_to_all_single_(un)?equal_split_group(_cuda)?",
    r"test_average_parameters|.*_averager(_.*)?",
    r"test_barrier_(full_)?group_cuda|test_barrier_timeout_(arg|global|group)",
    r"test_batch_isend_irecv_mixed_backend_err|test_broadcast_object_list",
    r"test_coalescing_manager.*",
    r"test_monitored_barrier_(?!gloo_(rank_0_timeout|subgroup)).*",
    r"test_new_subgroups.*",
    r"test_reduce_scatter_tensor_cuda|test_SyncBatchNorm_process_group",
    # the ranks of torch's group are not there: it has three
    r"test_(all_gather(_coalesced)?|barrier|broadcast|gather|scatter)_group",
    r"test_(all_reduce(_coalesced)?|reduce)_group_\w+",
]


def test_torchs_own_tests_pass_but_for_the_table_in_the_guide(tmp_path: Path) -> None:
    """Takes a minute or two: 108 of PyTorch's tests, on ranks of its own."""
    outcomes = ranks.outcomes_of("torch_c10d", tmp_path / "out.json", "--but", *NOT_OVER_GLOO)
    assert len(outcomes) == 108
    ranks.check(outcomes, "one-host.md")
