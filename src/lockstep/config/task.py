"""The definition of a training, in one object: everything that decides the weights on one worker.

`Settings` defines how it is run (workers, device, run directory). A task does not mention ranks, so
any number of ranks can run it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from lockstep.config import knob
from lockstep.config.documented import documented
from lockstep.config.parts import Parts
from lockstep.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel
    from torch.utils.data import Dataset

Precision = Literal["fp32", "bf16", "fp16", "tf32"]
Mode = Literal["max", "min"]
Unused = Literal["error", "zeros", "skip"]
SchedulerPer = Literal["step", "epoch"]
Record = Mapping[str, Any]
UNUSED: tuple[Unused, ...] = get_args(Unused)


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopping:
    """Stop when `metric` has not improved for `patience` evaluations in a row. All ranks stop
    together.

    Example::

        lockstep.EarlyStopping(metric="loss", mode="min", patience=3)
    """

    metric: str
    """The name of a metric of `Task.metrics`, or "loss"."""
    mode: Mode
    """Whether the largest or the smallest value is the best."""
    patience: int
    """Number of evaluations without a new best value after which training ends, at least 1."""

    def __post_init__(self) -> None:
        knob.chosen("EarlyStopping.mode", self.mode, get_args(Mode), error=TaskError)
        knob.whole("EarlyStopping.patience", self.patience, error=TaskError)


def first_part(batch: Any) -> tuple[Any, ...]:
    """Return the model's one argument: the first part of a tuple or list, else the whole batch."""
    return (batch[0] if isinstance(batch, (tuple, list)) else batch,)


@documented
@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Everything that defines a training: model, data, loss, optimizer and batch. `lockstep train
    my_task.py` calls the file's `task()`, which returns a Task.

    Of the data, only the lengths are checked here. The model is built later. Raises TaskError,
    naming the field, for an invalid value.

    Example::

        def task(lr=0.1):
            return lockstep.Task(
                model=Net,
                train_data=dataset,
                loss=lambda output, batch: (((output - batch[1]) ** 2).sum(), len(output)),
                optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
                global_batch=64,
                micro_batch=16,
            )
    """

    model: Callable[[], nn.Module]
    """Builds the model. Called under the shared random stream, so that it is equal on all ranks."""
    train_data: Dataset[Any]
    """The training data: a map-style data set (`__len__` and `__getitem__`), or an iterable one (a
    stream, whose epochs have no known length).
    """
    loss: Callable[[Any, Any], tuple[Tensor, float | Tensor]]
    """(output, batch) -> (sum of the losses, weight). The weight is the number of samples or tokens
    in the sum.
    """
    optimizer: Callable[[nn.Module], Optimizer]
    """model -> its optimizer. For several optimizers, write a loop with one Stepper for each."""
    global_batch: int
    """Samples of an optimizer step, over all ranks."""
    micro_batch: int
    """Samples of a forward. BatchNorm computes its statistics over these."""
    name: str | None = None
    """Name for messages and the run directory. Default: the name of the bundled task or file."""
    inputs: Callable[[Any], tuple[Any, ...] | Mapping[str, Any]] = first_part
    """batch -> the model's arguments: positional ones as a tuple, keywords as a dict. Default: the
    first part of a batch that is a tuple or list; a batch that is one tensor is the argument.
    """
    collate: Callable[[list[Any]], Any] | None = None
    """List of samples -> batch; default: torch's."""
    order: Callable[[Any], Any] | None = None
    """train_data -> the order of its samples: an order of lockstep.data.orders (weighted, mixed, in
    blocks) or a torch sampler. Default: shuffled. An order that makes the micro-batches itself (by
    length, a batch sampler) sets their sizes. A step has global_batch / micro_batch of them.
    """
    shuffle: bool | None = None
    """False: the data set's own order. Default: True, unless `order` says otherwise."""
    epochs: int = 1
    """Number of passes over train_data. --epochs and --steps override it."""
    seed: int = 0
    """Seed of initialisation, order, augmentation and dropout."""
    init_seed: int | None = None
    """Seed of torch while the model is built: the weights are those of torch.manual_seed(init_seed)
    and model(). Default: a random stream of `seed`.
    """
    scheduler: Callable[[Optimizer, int], LRScheduler] | None = None
    """(optimizer, number of scheduler steps) -> scheduler. The number is that of all optimizer
    steps in the training, or of all epochs with scheduler_per="epoch".
    """
    scheduler_per: SchedulerPer = "step"
    """When the scheduler is stepped: after every optimizer step, or after every epoch."""
    average: Callable[[nn.Module], AveragedModel] | None = None
    """model -> torch's AveragedModel of it, for EMA or SWA. Evaluations use the average in place of
    the model. Checkpoints keep it.
    """
    average_per: Literal["step", "epoch"] = "step"
    """When the average is updated: after every optimizer step that is not skipped, or after every
    epoch.
    """
    average_after: int = 0
    """Number of steps before the first update; of epochs with average_per="epoch". Until then
    evaluations use the model itself.
    """
    clip: float | None = None
    """Maximum norm of the gradient."""
    unused: Unused = "error"
    """How to treat a parameter that gets no gradient on any rank. "error": stop with an error;
    "zeros": its gradient is zeros; "skip": do not update it.
    """
    precision: Precision = "fp32"
    """bf16 and fp16 run the forward under autocast (fp16 with a loss scale). tf32 allows TF32 in
    float32 matrix products.
    """
    compile: bool = False
    """Compile the model with torch.compile."""
    eval_data: Dataset[Any] | None = None
    """A map-style data set that is evaluated after every epoch, each sample once."""
    eval_micro_batch: int | None = None
    """Samples of a forward in evaluation; default: `micro_batch`."""
    metrics: (
        Callable[[Any, Any], Mapping[str, tuple[Tensor | float, Tensor | float]]]
        | Mapping[str, Any]
        | None
    ) = None
    """(output, batch) -> {name: (sum, weight)}, on `eval_data`; or torchmetrics objects by name. In
    place of an object, a pair (object, function) also works: (output, batch) -> the arguments of
    update(). Default: (output, batch[1]). The loss is always evaluated, as "loss".
    """
    best: str | None = None
    """The metric that selects the best checkpoint, which is kept in addition to the newest ones."""
    best_mode: Mode | None = None
    """Whether the largest or the smallest value of `best` is the best; needed with `best`."""
    early_stopping: EarlyStopping | None = None
    """A lockstep.EarlyStopping: when to end training before all epochs."""
    on_step: Callable[[Record], None] | None = None
    """Called with the record of every optimizer step, as written to metrics.jsonl."""
    on_evaluate: Callable[[Record], None] | None = None
    """Called with the record of every evaluation."""
    callbacks_on: Literal["first", "all"] = "first"
    """The ranks that call `on_step` and `on_evaluate`."""
    describe: Callable[[Any], str] | None = None
    """sample of train_data -> a line about it, for `lockstep replay --samples`."""
    parts: Parts = field(default_factory=Parts)
    """Where the model may be cut when its layers or matrices are split over ranks (--mesh)."""

    @property
    def metric_objects(self) -> dict[str, Any] | None:
        """The torchmetrics objects of `metrics` by name; None if `metrics` is a function."""
        metrics: Any = self.metrics
        if hasattr(metrics, "items"):
            return dict(metrics.items())
        if hasattr(metrics, "compute"):
            return {type(metrics).__name__: metrics}
        return None

    def __post_init__(self) -> None:
        self._check_callables()
        self._check_sizes()
        self._check_data()
        self._check_evaluation()
        if not isinstance(self.parts, Parts):
            kind = type(self.parts).__name__
            raise TaskError("parts-of-other-type", kind=kind)
        for name, choices in (
            ("precision", get_args(Precision)),
            ("callbacks_on", ("first", "all")),
            ("unused", UNUSED),
            ("scheduler_per", get_args(SchedulerPer)),
            ("average_per", ("step", "epoch")),
        ):
            knob.chosen(f"Task.{name}", getattr(self, name), choices, error=TaskError)
        if self.scheduler is None and self.scheduler_per != "step":
            raise TaskError("no-scheduler", scheduler_per=self.scheduler_per)
        after = knob.whole("Task.average_after", self.average_after, 0, error=TaskError)
        if self.average is None and (self.average_per, after) != ("step", 0):
            raise TaskError("no-average", average_per=self.average_per, average_after=after)

    def _check_callables(self) -> None:
        names = ["model", "loss", "optimizer", "inputs"]
        optional = [
            "collate",
            "order",
            "scheduler",
            "average",
            "metrics",
            "on_step",
            "on_evaluate",
            "describe",
        ]
        names += [name for name in optional if getattr(self, name) is not None]
        if self.metric_objects is not None:
            names.remove("metrics")
        for name in names:
            value = getattr(self, name)
            if not callable(value):
                raise TaskError("not-a-function", name=f"Task.{name}", kind=type(value).__name__)
        if not isinstance(self.model, type) and hasattr(self.model, "named_parameters"):
            raise TaskError("model-already-built")

    def _check_sizes(self) -> None:
        names = ["global_batch", "micro_batch", "epochs"]
        if self.eval_micro_batch is not None:
            names.append("eval_micro_batch")
        for name in names:
            count = knob.whole(f"Task.{name}", getattr(self, name), error=TaskError)
            object.__setattr__(self, name, count)
        if self.micro_batch > self.global_batch:
            raise TaskError(
                "micro-batch-too-large",
                micro_batch=self.micro_batch,
                global_batch=self.global_batch,
            )
        seed = knob.whole("Task.seed", self.seed, -math.inf, error=TaskError)
        object.__setattr__(self, "seed", seed)
        if self.init_seed is not None:
            init_seed = knob.whole("Task.init_seed", self.init_seed, 0, error=TaskError)
            object.__setattr__(self, "init_seed", init_seed)
        if self.clip is not None:
            knob.number("Task.clip", self.clip, above=0, error=TaskError)

    def _check_data(self) -> None:
        data: Any = self.train_data
        kind = type(data).__name__
        if _is_map_style(data):
            _check_not_empty("Task.train_data", data)
        elif hasattr(data, "__next__") or not hasattr(data, "__iter__"):
            raise TaskError("not-a-dataset", kind=kind)
        elif self.order is not None:  # a stream may be empty: that is only known later
            raise TaskError("numbers-of-stream", name="Task.order", dataset=kind)
        if self.eval_data is not None:
            kind = type(self.eval_data).__name__
            if not _is_map_style(self.eval_data):
                raise TaskError("not-map-style", name="Task.eval_data", kind=kind)
            _check_not_empty("Task.eval_data", self.eval_data)

    def _check_evaluation(self) -> None:
        if self.best_mode is not None:
            knob.chosen("Task.best_mode", self.best_mode, get_args(Mode), error=TaskError)
        if (self.best is None) != (self.best_mode is None):
            raise TaskError("best-without-mode", best=self.best, best_mode=self.best_mode)
        if self.eval_data is None:
            for name in ("best", "early_stopping", "metrics", "eval_micro_batch", "on_evaluate"):
                if getattr(self, name) is not None:
                    raise TaskError("metric-without-eval-data", name=f"Task.{name}")
        if self.metrics is None:
            if self.best not in (None, "loss"):
                raise TaskError("no-metrics", name="Task.best", metric=self.best)
            stopping = self.early_stopping
            if stopping is not None and stopping.metric != "loss":
                raise TaskError("no-metrics", name="Task.early_stopping", metric=stopping.metric)


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _check_not_empty(name: str, data: Any) -> None:
    if len(data) == 0:
        raise TaskError("empty-dataset", name=name)
