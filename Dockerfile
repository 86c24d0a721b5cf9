# Lockstep and its bundled tasks, by the README's command. For a pod of a TrainJob, a PyTorchJob or, with Ray added, a RayJob (docs/guide/kubernetes.md), or any other container.
#   docker build --tag lockstep .
# PIP_INDEX_URL: where pip looks, for example for torch's wheels without CUDA, which are much smaller.
FROM python:3.11-slim
ARG PIP_INDEX_URL
WORKDIR /lockstep
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir "torch>=2.11,<2.14" ".[tasks]"
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
CMD ["lockstep", "--help"]
