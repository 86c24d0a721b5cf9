"""Production code of protocols, unchanged, on a disk, a clock and processes that a seed drives.

`python -m tests.simulation --seeds 1000000` runs more seeds than the tests do; `--seed N` replays one.
"""
