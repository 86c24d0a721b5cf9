"""Mistakes of data-parallel scripts that can be seen without running them: pure functions over the syntax tree, without torch.

A rule keeps quiet where it cannot be sure; what each one cannot see is in docs/guide/lint.md.
"""

from lockstep.lint.check import check_file, check_text
from lockstep.lint.finding import Finding

__all__ = ["Finding", "check_file", "check_text"]
