"""Mistakes of data-parallel scripts that can be seen without running them: pure functions over
LibCST's tree, without torch.

A rule keeps quiet where it cannot be sure; what each one cannot see is in docs/guide/lint.md.
LibCST is used as it is, without Fixit: Fixit 2.2 requires click < 8.2, which huggingface-hub (and
with it accelerate and datasets) forbids.
"""

from lockstep.tools.lint.check import Checked, LintFinding, check_file, check_source
from lockstep.tools.lint.rules import RULES

__all__ = ["RULES", "Checked", "LintFinding", "check_file", "check_source"]
