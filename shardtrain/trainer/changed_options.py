"""Which options of a run may differ from those of the checkpoint that it resumes from.

Options that change samples or the model may not, unless `Allow.changed` names them. Next: `resume.py`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from shardtrain.checkpoints.differences import differences, matches
from shardtrain.errors.messages import problems_error
from shardtrain.trainer.config import Run

FREE = (
    *("batch", "batch_unit", "batch_growth", "steps", "nonfinite"),
    *("strategy.*", "optimizer", "optimizer.*", "scaling.*"),
    *("log_every", "evaluate_every", "evaluate_batches", "evaluate_with", "gradient_noise_scale"),
    "check_layout",
    *("checkpoints.*", "run_dir", "sample", "unit", "loss.metrics.*", "freeze"),
    *("names.*", "allow.*", "start_from.*", "recovery.*", "data", "data.*", "watch.*", "time_limit*"),
    *("loading.*", "hooks", "hook_errors", "sinks", "replay", "model.loss_chunk"),
)
"""Options that may differ from those of the checkpoint; each change is reported. Data that differs is read
from its beginning. Any other option must be the same, or be allowed by `Allow.changed`."""

NOTHING: tuple[Any, ...] = (None, "", [])
"""Values by which an option that a checkpoint does not know changes nothing."""

SEED = "seed"


def check_options(
    saved: Mapping[str, Any], description: Mapping[str, Any], run: Run, note: Callable[[str], None]
) -> None:
    """Report the options that differ from those of the checkpoint, and refuse those that may not.

    Args:
      saved: description of the run that saved, see `config.describe`.
      description: the description of this run.
      run: this run.
      note: receives a line for each option that may differ, and does.

    Raises:
      ValueError: lists every option that may not differ, and does.
    """
    seed = saved.get(SEED)
    if seed != run.seed and not matches(SEED, run.allow.changed):
        raise ValueError(
            f"seed is {run.seed}, but the run in {run.run_dir} started with seed {seed!r}: its order of"
            f" samples would change. Use --seed {seed}, or another --run-dir"
        )
    # the saved description went through JSON
    now = json.loads(json.dumps(dict(description)))
    refused = []
    for name in dict.fromkeys([*saved, *now]):
        if name not in saved and (now[name] in NOTHING or now[name] is False):
            continue  # an option that earlier versions had not
        for line in differences(*({name: each[name]} if name in each else {} for each in (saved, now))):
            if matches(name, (*FREE, *run.allow.changed)):
                note(f"changed since then: {line}")
            else:
                refused.append(f"{line}; put it back, or allow it: --allow.changed {name}")
    if refused:
        raise problems_error(f"the checkpoint in {run.run_dir} is of another run", refused)


def check_synchronous_steps(saved: Mapping[str, Any], run: Run, step: int) -> None:
    """Refuse synchronous steps after local ones: replicas have optimizer states of their own by then.

    Args:
      saved: description of the run that saved.
      run: this run.
      step: the step of the checkpoint.

    Raises:
      ValueError: the run would go back from local steps to synchronous ones.
    """
    names = ("strategy.synchronisation.on", "strategy.synchronisation.synchronous_steps")
    before, asked = saved.get(names[1]) or 0, run.strategy.synchronisation.synchronous_steps
    if saved.get(names[0]) == "deltas" and before < step < asked:
        raise ValueError(
            f"synchronous_steps is {asked}, but the run in {run.run_dir} is at step {step} and its steps"
            f" after {before} were local: each replica has its own state of the optimizer. Use"
            f" --synchronous-steps {step} or fewer, or another --run-dir"
        )
