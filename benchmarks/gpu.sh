#!/bin/sh
# Everything that one GPU can show, in under 8 minutes, on a machine with Python 3.11 and a CUDA driver:
#
#     benchmarks/gpu.sh                       tables in gpu.json and gpu.txt
#     benchmarks/gpu.sh --out results/h100    in results/h100.json and results/h100.txt
#     DEVICE=cpu benchmarks/gpu.sh            the same stages on the CPU: all but CUDA
#
# Installs the checkout into a virtual environment of its own (--venv, default .venv-gpu). pip's own variables say where torch
# comes from, such as PIP_INDEX_URL and PIP_EXTRA_INDEX_URL.
cd "$(dirname "$0")/.." && exec "${PYTHON:-python3.11}" benchmarks/gpu.py --device "${DEVICE:-cuda}" "$@"
