"""What the loggers' own readers find in a run directory."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(file: Path) -> Iterator[Any]:
    """An offline run's records, by W&B's own message type. The package has no reader of the file:
    a LevelDB log with seven bytes before it.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        part += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(part)
            yield record
            part = b""


def pairs(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def of_wandb(run: Path) -> list[dict[str, Any]]:
    """One dict for each process that logged: id, config, history by step, summary, exit code."""
    found = []
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        one: dict[str, Any] = {"history": {}, "steps": [], "summary": {}}
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                one |= {
                    "id": record.run.run_id,
                    "project": record.run.project,
                    "config": pairs(record.run.config.update),
                }
            elif kind == "history":
                one["steps"].append(record.history.step.num)
                one["history"][record.history.step.num] = pairs(record.history.item)
            elif kind == "summary":
                one["summary"] |= pairs(record.summary.update)
            elif kind == "exit":
                one["exit"] = record.exit.exit_code
        found.append(one)
    return found


def of_mlflow(uri: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The only run of the store, and its metrics' history."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    history = {
        name: sorted(
            (each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)
        )
        for name in run.data.metrics
    }
    return run, history


def of_tensorboard(run: Path) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return events, {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}


def of_csv(run: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    with (run / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name != "step":
                    found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def of_journal(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What each of them should have."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            for name in ("loss", "lr", "grad_norm", "epoch"):
                found.setdefault(f"train/{name}", []).append((record["step"], record[name]))
            workers = record["step"], len(record["samples_by_rank"])
            found.setdefault("train/workers", []).append(workers)
        elif record["kind"] == "evaluate":
            for name, value in record["metrics"].items():
                found.setdefault(f"evaluate/{name}", []).append((record["step"], value))
    return found
