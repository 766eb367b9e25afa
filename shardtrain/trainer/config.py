"""The configuration of a run: model, data, loss, optimizer and all other options.

A run file is Python with `def run() -> Run`. The same fields are options of the command line (`cli/`).
Next: `loop.py`, the training loop.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import numpy as np
import optax
from jax.sharding import PartitionSpec

from shardtrain.axes import PIPELINE
from shardtrain.checkpoints.differences import Allow
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data.batches import Loading
from shardtrain.elastic.options import Elastic
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.errors.options import write_compact
from shardtrain.functional.compute_dtype import has_dtype, set_compute_dtype
from shardtrain.functional.frozen import freeze_parameters
from shardtrain.functional.loss import Loss, next_token_loss
from shardtrain.functional.model import Model, gather_unnamed
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.remat import apply_remat
from shardtrain.islands.watchdog.diagnosis import Watch
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.scaling import Scaling
from shardtrain.report.sinks import DEFAULT_SINKS, sink_problems
from shardtrain.trainer.feed import growth_problems
from shardtrain.trainer.hooks import Hook, HookErrors
from shardtrain.trainer.recovery import Recovery
from shardtrain.trainer.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class StartFrom:
    """The checkpoint whose parameters start a run that has no checkpoint of its own.

    Args:
      checkpoint: checkpoint with the initial parameters and model state: a run's folder, its folder of
        checkpoints, the folder of a step, or a folder of Hugging Face; on the command line a folder of
        Hugging Face sets the model and the tokenizer too. None initialises parameters at random from the
        seed.
      adapter: folder of the PEFT library with low-rank adapters to load in addition to the parameters of a
        folder of Hugging Face; on the command line it sets the option lora of the model too.
      upcycle: start a decoder with experts (model.experts) from a dense checkpoint: each expert begins as a
        copy of the dense feed-forward layer, and routers begin with random parameters.
      step: step of the checkpoint of the earlier run. None means the newest; "best" the best by its
        checkpoints.best.

    Short form: the folder.

    Raises:
      ValueError: lists every value of a wrong type.
    """

    checkpoint: Path | None = None
    step: int | Literal["best"] | None = None
    adapter: Path | None = None
    upcycle: bool = False

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """Return the fields that a bare value sets, or None if it is not a short form."""
        return {"checkpoint": value} if isinstance(value, str | Path) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.step is not None and self.checkpoint is None:
            problems.append(f"step is {self.step} of no checkpoint; give the checkpoint too, a run's folder")
        if self.adapter is not None and self.checkpoint is None:
            problems.append(f"adapter is {self.adapter} of no model; give its folder as checkpoint too")
        if self.upcycle and self.checkpoint is None:
            problems.append("upcycle is of no model; give the dense model's folder as checkpoint too")
        if isinstance(self.step, int) and self.step < 0:
            problems.append(f"step is {self.step}; use 0 or more, or None for the newest")
        refuse("a run cannot start from this", problems)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    Args:
      model: a function rngs -> nnx.Module (a config of `shardtrain.models` is one), or a
        `shardtrain.Model`. The fields of a dataclass are options of the command line: --model.NAME.
      names: names of parameter dims, for a model that does not name them itself: a pattern of paths
        (fnmatch: * matches / too) -> a name or None for each dim, as {"*/kernel": ("embed", "mlp")}.
        They override the model's own names; if several patterns match, the first one applies.
      freeze: patterns (fnmatch) of the paths of parameters that are not trained and need no optimizer state;
        a pattern that begins with ! excepts what it matches, as in '*' '!head/*'. None means that a
        model with low-rank adapters trains only these, and any other model all parameters.
      data: an object with `train(folder)` and `heldout(folder)`, which return random-access sources of
        samples; see `shardtrain.data.Text`. heldout may return None, or several sources as name -> source:
        each is evaluated, and logged as heldout/NAME/loss.
      loss: (apply, batch) -> (sum, count).
      optimizer: options of a built-in optimizer, or any optax transformation; each update receives the loss
        as `value`. `strategy.accumulate` replaces optax.MultiSteps, with a single reduction per step.
      strategy: layout, gradient accumulation, replicas, islands and pipeline.
      batch: number of examples in a step, over all devices and microbatches; with batch_unit="tokens" the
        largest number of tokens.
      batch_unit: unit of `batch`. With "tokens", samples of similar length share a batch, which is padded to
        one of a few lengths, and padding counts; the data gives the `lengths` of its samples.
      batch_growth: enlarge the batch during the run, instead of lowering the learning rate: "500:2,1000:4"
        takes 2 batches in each step after step 500 and 4 after step 1000, and multiplies the microbatches
        too; "2 epochs:2" takes 2 batches in each step after 2 epochs.
      loading: threads or worker processes that load training batches ahead.
      steps: number of training steps; a resumed run counts those already done.
      seed: random seed of the initial parameters, dropout and data order.
      nonfinite: what to do if the loss or a gradient is not finite. Such a step never changes the parameters;
        "skip" reports it and continues, "stop" ends the run, "roll_back" returns to the newest checkpoint
        and continues with later data.
      log_every: number of steps between two lines of metrics.
      gradient_noise_scale: log the gradient noise scale, which estimates the critical batch, from the
        gradient norms of microbatches and replicas.
      check_layout: before the first step, compare the gradients of a few rows on this mesh with the gradients
        on one device. "rows=2" takes 2 rows for each device along the batch; "off" disables the check; "auto"
        takes 2 rows if operators have shardings of their own, or if the mesh has at least two axes and the
        model has operations that were not tested on such meshes.
      evaluate_every: number of steps between two evaluations on held-out data. None evaluates only at the
        end.
      evaluate_batches: number of held-out batches in an evaluation, always the first ones. None means all.
      checkpoints: when to save checkpoints and which to keep.
      run_dir: folder of the run: checkpoints, metrics and logs. None means runs/ and the name of the run
        file.
      evaluate_with: the parameters to evaluate, sample and export. None means the trained ones, "ema" the
        average that the optimizer keeps, "schedule_free" the parameters of optax.contrib.schedule_free. In
        Python also a function (optimizer state, parameters) -> parameters.
      sample: a function apply -> text, whose text is printed at the end; `apply` is a
        `jax.tree_util.Partial`.
      unit: the name of what the loss counts, such as tokens or examples; shown with rates.
      scaling: options to change if several replicas train the run.
      start_from: the checkpoint with the initial parameters.
      allow: the allowed differences between a checkpoint and the run that reads it.
      recovery: detection of loss spikes, faulty devices and slow islands, and rollbacks.
      watch: time limits after which the watchdog ends a run that hangs.
      elastic: islands that come and go while the run trains.
      sinks: where metrics are written: jsonl (always), tensorboard, wandb, mlflow. In Python also functions
        (folder, resume_after, report) -> sink.
      hooks: functions of yours that rank 0 calls after steps, log lines, evaluations and saves, and at the
        end.
      hook_errors: what to do if a hook raises an exception: "report" it and continue, or "stop" the run.
      replay: folder of an earlier run in waves (--clock-distance) with the same islands and options. Pushes
        are added in the recorded order, so the parameters become the same.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    model: Any
    data: Any
    loss: Loss = next_token_loss
    optimizer: Optimizer | optax.GradientTransformation = Optimizer()
    strategy: Strategy = Strategy()
    batch: int = 32
    batch_unit: Literal["examples", "tokens"] = "examples"
    batch_growth: str = ""
    loading: Loading = Loading()
    steps: int = 1000
    seed: int = 0
    nonfinite: Literal["skip", "stop", "roll_back"] = "skip"
    log_every: int = 10
    gradient_noise_scale: bool = False
    check_layout: str = "auto"
    evaluate_every: int | None = 100
    evaluate_batches: int | None = 8
    evaluate_with: Literal["ema", "schedule_free"] | Callable[[Any, Any], Any] | None = None
    checkpoints: CheckpointPolicy = CheckpointPolicy(every_steps=None, every_minutes=10.0)
    run_dir: Path | None = None
    names: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    freeze: tuple[str, ...] | None = None
    sample: Callable[[Any], str] | None = None
    unit: str = "tokens"
    scaling: Scaling = Scaling()
    start_from: StartFrom = StartFrom()
    allow: Allow = Allow()
    recovery: Recovery = Recovery()
    watch: Watch = Watch()
    elastic: Elastic = Elastic()
    sinks: tuple[str | Callable[..., Any], ...] = DEFAULT_SINKS
    hooks: tuple[Hook, ...] = ()
    hook_errors: HookErrors = "report"
    replay: Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, optax.MultiSteps):
            object.__setattr__(self, "optimizer", self.optimizer.gradient_transformation())
        refuse("this run cannot be started", [*wrong_types(self), *_wrong_values(self)])


def make_model(run: Run, remat: str | None = None) -> Model:
    """Return a run's model as pure functions, with the names, dtype and remat of the run, or another remat.

    Raises:
      ValueError: the value is no model, or it cannot be computed as the strategy says.
    """
    model, dtype = run.model, run.strategy.compute_dtype
    # fields of a configuration first: once one option wraps it, it has none
    if has_dtype(model):
        model, dtype = set_compute_dtype(model, dtype), None
    model = set_compute_dtype(apply_remat(model, remat or run.strategy.remat), dtype)
    pure = convert_model(model, run.names)
    if run.strategy.layout.unnamed == "shard":
        pure = gather_unnamed(pure)
    return freeze_parameters(pure, run.freeze)


COUNTS = ("batch", "steps", "log_every", "evaluate_every", "evaluate_batches")


def _wrong_values(run: Run) -> list[str]:
    """Return the values that have the right type but are out of range."""
    problems = []
    if missing := [name for name in ("train", "heldout") if not callable(getattr(run.data, name, None))]:
        problems.append(
            f"data is {type(run.data).__name__}, without {' and '.join(missing)}; give an object with"
            " train(folder) and heldout(folder), each returning samples by number (heldout may return None)"
        )
    problems += [
        f"{name} is {value}; use 1 or more"
        for name in COUNTS
        if (value := getattr(run, name)) is not None and value < 1
    ]
    if has_dtype(run.model) and run.model.dtype in ("float16", np.float16):
        problems.append(
            "model.dtype is float16, whose gradients overflow or vanish without a scale of the loss; use"
            " strategy.compute_dtype, which scales it: --compute-dtype float16"
        )
    if run.replay is not None and run.strategy.synchronisation.distance is None:
        problems.append(
            f"replay is {run.replay}, and only waves can be replayed; give --clock-distance as in the earlier"
            " run, or leave replay out: other runs are deterministic"
        )
    if run.replay is not None and run.strategy.across.shares == "auto":
        problems.append(
            f"replay is {run.replay}, and shares is 'auto', by which rows depend on the clock; give the"
            " weights of the earlier run: --shares 2,1"
        )
    in_stages = run.strategy.across.axis == PIPELINE or run.strategy.layout.mesh.get(PIPELINE, 1) != 1
    if run.batch_unit == "tokens" and in_stages:
        problems.append(
            "batch_unit is 'tokens', and the stages of a pipeline need batches of one shape; use --batch-unit"
            " examples, or no pipeline"
        )
    if run.batch_unit == "tokens" and run.strategy.across.share_limits == "auto":
        problems.append(
            "share_limits is 'auto', which measures one shape of batches, and batch_unit is 'tokens', whose"
            " batches have several; give each island a number of tokens, such as --share-limits 2048,4096"
        )
    problems += [*growth_problems(run), *_noise_problems(run)]
    problems += sink_problems(run.sinks)
    if parse_checked_rows(run.check_layout) is None:
        problems.append(f"check_layout is {run.check_layout!r}; use auto, off, or a number of rows: rows=2")
    if not 0 <= run.seed < 2**32:
        problems.append(f"seed is {run.seed}; use a number from 0 to 2**32 - 1")
    for pattern, dims in run.names.items():
        if not isinstance(pattern, str):
            problems.append(f"names has the pattern {pattern!r}; give text, such as '*/kernel'")
        if not isinstance(dims, tuple | list | PartitionSpec):
            problems.append(
                f"names[{pattern!r}] is {dims!r}; give a name or None for each dim,"
                " as ('embed', 'mlp') or (None,)"
            )
    return problems


def parse_checked_rows(check_layout: str) -> int | None:
    """Parse `check_layout` as a number of rows for each device; None if it cannot be read.

    >>> [parse_checked_rows(text) for text in ("auto", "off", "rows=4", "4")]
    [2, 0, 4, None]
    """
    if check_layout in (named := {"auto": 2, "off": 0}):
        return named[check_layout]
    found = re.fullmatch(r"rows=([1-9]\d{0,5})", check_layout)
    return int(found[1]) if found else None


def describe(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a run, or any part of it, to plain data: dotted name -> number, text, list or None.

    A function is represented by its import name: enough to compare and to read, not to rebuild the run.

    >>> describe(Strategy(accumulate=4))["accumulate"]
    4
    """
    value = write_compact(value)
    if is_dataclass(value) and not isinstance(value, type):
        items = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, Synchronisation) and type(value) is not Synchronisation:
            items["kind"] = type(value)
    elif isinstance(value, Mapping) and len(value) <= MOST_ITEMS:
        items = dict(value)
    elif isinstance(value, Mapping):
        return {prefix: f"{len(value)} items, {_digest(repr({k: _scalar(v) for k, v in value.items()}))}"}
    else:
        return {prefix: _scalar(value)}
    flat: dict[str, Any] = {}
    for name, item in items.items():
        flat |= describe(item, f"{prefix}.{name}" if prefix else str(name))
    return flat


MOST_ITEMS, MOST_CHARACTERS = 64, 2000
"""Limits of a list and of a text in a description; a longer one is replaced by its length and a digest."""


def _digest(text: str) -> str:
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _scalar(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return f"{len(value)} characters, {_digest(value)}"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, FunctionType | type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        # a list of samples may be very long, and is not useful in a description
        items = [_scalar(item) for item in value[:MOST_ITEMS]]
        if len(value) > MOST_ITEMS or len(repr(items)) > MOST_CHARACTERS:
            return f"{len(value)} items, {_digest(repr([_scalar(item) for item in value]))}"
        return items
    if (dtype := getattr(value, "dtype", None)) is not None and hasattr(value, "shape"):
        return f"given in Python ({dtype} {np.shape(value)})"
    return f"given in Python ({type(value).__module__}:{type(value).__qualname__})"


def run_text(description: Mapping[str, Any]) -> str:
    """Format a description as text, one option per line: `batch = 32`."""
    return "".join(f"{name} = {value!r}\n" for name, value in description.items())


def _noise_problems(run: Run) -> list[str]:
    """Return why a run cannot measure the gradient noise scale, one line each."""
    if not run.gradient_noise_scale:
        return []
    synchronisation, given = run.strategy.synchronisation, "gradient_noise_scale is on, with"
    needs = (
        "whose result is not the mean of all examples' gradients, and its norm is needed; use --combine mean"
        " on gradients, with inside mean"
    )
    found = []
    if not synchronisation.is_mean:
        found.append(f"{given} combine {synchronisation.by!r} on {synchronisation.on}, {needs}")
    if synchronisation.inside != "mean":
        found.append(f"{given} inside {synchronisation.inside!r}, {needs}")
    if run.strategy.across.axis == PIPELINE:
        found.append(
            f"{given} across 'pipeline', where each stage knows the norms of its own parameters only; use a"
            " pipeline inside a mesh (--mesh pipeline=2,data=2)"
        )
    return found
