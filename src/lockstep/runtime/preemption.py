"""Whether this process was asked to stop. The launcher's signal handlers set it
(launcher/preemption.py), and a training reads it in every step.
"""

from __future__ import annotations

asked = False
"""Whether a scheduler, a user or another rank has asked this process to stop."""
