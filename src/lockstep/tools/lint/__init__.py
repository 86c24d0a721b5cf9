"""Find mistakes in data-parallel scripts without running them. The rules are pure functions over a
syntax tree. They need no torch.

A rule reports nothing if it is not sure; docs/guide/lint.md says what each rule cannot see.
"""

from lockstep.tools.lint.check import Checked, LintFinding, check_file, check_source
from lockstep.tools.lint.rules import RULES

__all__ = ["RULES", "Checked", "LintFinding", "check_file", "check_source"]
