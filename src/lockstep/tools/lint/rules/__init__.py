"""The rules by their codes. A rule is a function from a file's Script to its Problems;
docs/guide/lint.md has a row for each rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockstep.tools.lint.rules import accumulation, data, gradients, process_start
from lockstep.tools.lint.rules.rank_conditional import rank_conditional_collective
from lockstep.tools.lint.script import Problem, Script

RULES: dict[str, Callable[[Script], Iterator[Problem]]] = {
    "no-sync-modulo": accumulation.no_sync_modulo,
    "no-sync-tail": accumulation.no_sync_tail,
    "accumulation-tail": accumulation.accumulation_tail,
    "forward-through-module": gradients.forward_through_module,
    "forgotten-set-epoch": data.forgotten_set_epoch,
    "rank-conditional-collective": rank_conditional_collective,
    "gradient-conditional-collective": gradients.gradient_conditional_collective,
    "clip-inside-no-sync": gradients.clip_inside_no_sync,
    "undivided-sum": gradients.undivided_sum,
    "sum-loss": gradients.sum_loss,
    "last-batch-loss": gradients.last_batch_loss,
    "constant-seed": data.constant_seed,
    "unseeded-data": data.unseeded_data,
    "blocking-copy": data.blocking_copy,
    "padded-metric": data.padded_metric,
    "seed-plus-rank": process_start.seed_plus_rank,
    "fixed-port": process_start.fixed_port,
    "nccl-timeout": process_start.nccl_timeout,
    "device-from-rank": process_start.device_from_rank,
    "device-not-set": process_start.device_not_set,
}
