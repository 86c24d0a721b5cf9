"""Draws memory.svg: the memory that is in use during one training step of a small transformer on the
CPU, as torch's profiler records it: plain, with activation checkpointing, and with bfloat16.

    python docs/pictures/memory.py --out memory.svg
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from lockstep.launcher.launch import launch
from lockstep.tools.drawing import FAINT, Drawing, Plot, figure

LAYERS, WIDTH, SEQUENCES, LENGTH, TOKENS = 6, 256, 16, 128, 256
VARIANTS = ("plain", "activation checkpointing", "bfloat16 autocast")
_COLOURS = {
    "weights": "var(--blue)",
    "Adam's state": "var(--purple)",
    "gradients": "var(--gold)",
    "activations and scratch": "var(--orange)",
}
_PHASES = ("forward", "backward", "update")
_POINTS = 240  # of a curve

Curve = list[tuple[float, float]]
"""Shares of the step's time in percent, and megabytes."""


class Transformer(nn.Module):
    """Predicts the next token of each sequence."""

    def __init__(self, layers: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


@dataclass(frozen=True, slots=True)
class RecordedMemory:
    """What one step had in memory. All times are shares of the step's time, in percent."""

    weights: float
    """Megabytes that do not change."""
    state: float
    """Megabytes of Adam's two averages."""
    gradients: Curve
    total: Curve
    phases: dict[str, tuple[float, float]]

    @property
    def peak(self) -> float:
        return max(megabytes for _, megabytes in self.total)


def recorded(variant: str, layers: int = LAYERS) -> RecordedMemory:
    """Train two steps, and return what the second one had in memory. The profiler counts what a
    process allocates, so each recording needs a new one.
    """
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        model = Transformer(layers, recompute=variant == "activation checkpointing")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_note_gradient)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.randint(TOKENS, (SEQUENCES, LENGTH + 1))
        for _ in range(2):
            _step(model, optimizer, tokens, torch.bfloat16 if "bfloat16" in variant else None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1e6
    return _last_step(events, weights)


def _note_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with record_function(f"gradient {parameter.grad.nbytes}"):
        pass


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, dtype: torch.dtype | None
) -> None:
    optimizer.zero_grad()
    with record_function("forward"), ExitStack() as autocast:
        if dtype is not None:
            autocast.enter_context(torch.autocast("cpu", dtype=dtype))
        outputs = model(tokens[:, :-1])
        loss = F.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten())
    del outputs
    with record_function("backward"):
        loss.backward()
    with record_function("update"):
        optimizer.step()


def _last_step(events: Sequence[dict[str, Any]], weights: float) -> RecordedMemory:
    phases: dict[str, tuple[float, float]] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] in _PHASES:
            phases[event["name"]] = (event["ts"], event["ts"] + event["dur"])  # the last one stays
    begin, end = phases["forward"][0], phases["update"][1]

    def share(moment: float) -> float:
        return 100 * (moment - begin) / (end - begin)

    total, gradients, summed = [], [(0.0, 0.0)], 0.0
    inside = [event for event in events if begin <= event.get("ts", 0) <= end]
    for event in sorted(inside, key=lambda event: event["ts"]):
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0:
            total.append((share(event["ts"]), event["args"]["Total Allocated"] / 1e6))
        elif event["name"].startswith("gradient "):
            gradients.append((share(event["ts"]), summed))
            summed += int(event["name"].split()[1]) / 1e6
            gradients.append((share(event["ts"]), summed))
    gradients.append((100.0, summed))
    shares = {name: (share(first), share(last)) for name, (first, last) in phases.items()}
    return RecordedMemory(weights, 2 * weights, gradients, total, shares)


def thinned(curve: Curve) -> Curve:
    """Return the highest point of each of `_POINTS` equal parts of the time."""
    highest: dict[int, tuple[float, float]] = {}
    for at, value in curve:
        part = int(at / 100 * _POINTS)
        if part not in highest or value > highest[part][1]:
            highest[part] = (at, value)
    return list(highest.values())


def drawing(memories: dict[str, RecordedMemory]) -> Drawing:
    """Draw one panel per variant. What is in memory is stacked: the weights are at the bottom."""
    highest = max(memory.peak for memory in memories.values())
    plots, peaks = [], []
    for variant, memory in memories.items():
        peaks.append(f"{variant}: peak {memory.peak:.0f} MB")
        plots.append(_panel(memory, peaks[-1], highest, first=not plots))
    title = (
        f"Memory over one training step of a transformer with {memory.weights:.0f} MB of weights"
    )
    return figure(title, plots, ". ".join(peaks))


def _panel(memory: RecordedMemory, title: str, highest: float, first: bool) -> Plot:
    plot = Plot(
        (0, 100),
        "% of the step's time",
        up=(0, 1.1 * highest),
        up_label="MB",
        legend=_COLOURS if first else None,
        title=title,
    )
    fixed = memory.weights + memory.state
    with_gradients = [(at, fixed + megabytes) for at, megabytes in memory.gradients]
    plot.area(thinned(memory.total), _COLOURS["activations and scratch"])
    plot.area(with_gradients, _COLOURS["gradients"])
    plot.area([(at, fixed) for at in (0, 100)], _COLOURS["Adam's state"])
    plot.area([(at, memory.weights) for at in (0, 100)], _COLOURS["weights"])
    for name, (begin, end) in memory.phases.items():
        top = plot.y(1.1 * highest)
        plot.line([(plot.x(begin), plot.y(0)), (plot.x(begin), top)], FAINT, 1)
        if plot.x(end) - plot.x(begin) > 40:
            plot.words(plot.x((begin + end) / 2), top + 9, name, anchor="middle", size=10)
    return plot


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--out", required=True)
    file = options.parse_args().out
    memories = {variant: launch(recorded, 1, (variant,))[0] for variant in VARIANTS}
    drawing(memories).save(file)


if __name__ == "__main__":
    main()
