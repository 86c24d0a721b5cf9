"""Run scripts one after another on the same ranks: what they import takes longer than they do.

lockstep run --workers 2 upstream_ranks.py SCRIPT...
"""

import os
import runpy
import sys
from pathlib import Path

for name in sys.argv[1:]:
    if os.environ["RANK"] == "0":
        print("script", Path(name).stem)
    runpy.run_path(name, run_name="__main__")
