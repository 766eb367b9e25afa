"""Send metrics to Weights & Biases; the one module that imports wandb.

wandb's own environment variables give project, entity and mode: WANDB_PROJECT, WANDB_MODE=offline.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from shardtrain.report.sinks.tracked_run import TrackedSink, open_tracked, run_options

RUN_ID = "wandb_run.txt"
"""The file in the folder of a run with its W&B id, and the steps that W&B has."""

FLUSH_SECONDS = 0.1
"""Interval of W&B's writes to its file; by default a killed process loses up to 15 s."""


def open_wandb(folder: Path, resume_after: int | None, report: Callable[[str], None]) -> TrackedSink | None:
    """Open a run at W&B, or continue the one of this folder; its files are in `wandb/` of the folder.

    Raises:
        ValueError: W&B cannot be reached, or nobody is logged in, at the first start.
    """
    import wandb

    def begin(run_id: str | None):
        run = wandb.init(
            dir=folder,
            id=run_id or secrets.token_hex(8),
            resume="allow",
            name=os.environ.get("WANDB_NAME") or folder.resolve().name,
            config=run_options(folder),
            # keep another run of the user in this process
            reinit="create_new",
            # leave the terminal to the run
            settings=wandb.Settings(
                console="off", silent=True, x_transaction_log_flush_interval=FLUSH_SECONDS
            ),
        )
        if not run.offline and run.url:
            report(f"W&B run: {run.url}")

        def log(step: int, values: Mapping[str, float]) -> None:
            # without `commit` W&B keeps a step until the next one
            run.log(dict(values), step=step, commit=True)

        return run.id, log, run.finish

    return open_tracked("W&B", folder / RUN_ID, resume_after, report, begin)
