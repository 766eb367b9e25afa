"""Send metrics to MLflow; the one module that imports mlflow.

The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME give server and experiment; without a
server the run folder gets a database.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardtrain.report.sinks.tracked_run import TrackedSink, open_tracked, run_options

RUN_ID = "mlflow_run.txt"
"""The file in the folder of a run with its MLflow id, and the steps that MLflow has."""

DATABASE, ARTIFACTS = "mlflow.db", "mlflow_artifacts"
"""The files in the folder of a run that has no server."""

EXPERIMENT = "shardtrain"
MOST_CHARACTERS = 500
"""Longest value of a parameter at MLflow; a longer one is cut off."""


def open_mlflow(folder: Path, resume_after: int | None, report: Callable[[str], None]) -> TrackedSink | None:
    """Open a run at MLflow, or continue the one of this folder.

    Raises:
        ValueError: the server cannot be reached, at the first start.
    """
    # messages about the database are of no interest to the user
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    def begin(run_id: str | None):
        server = os.environ.get("MLFLOW_TRACKING_URI")
        client = MlflowClient(tracking_uri=server or f"sqlite:///{folder.resolve() / DATABASE}")
        if run_id is None:
            run_id = _new_run(client, folder, None if server else (folder.resolve() / ARTIFACTS).as_uri())
        else:
            client.update_run(run_id, status="RUNNING")

        def log(step: int, values: Mapping[str, float]) -> None:
            now = int(time.time() * 1000)
            client.log_batch(run_id, [Metric(name, float(x), now, step) for name, x in values.items()])

        return run_id, log, lambda: client.set_terminated(run_id)

    return open_tracked("MLflow", folder / RUN_ID, resume_after, report, begin)


def _new_run(client: Any, folder: Path, artifacts: str | None) -> str:
    """Create a run with the options of the run file, in the experiment of the environment; return its id."""
    from mlflow.entities import Param

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name, artifact_location=artifacts)
    run_id = client.create_run(experiment, run_name=folder.resolve().name).info.run_id
    options = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in run_options(folder).items()]
    for start in range(0, len(options), 100):
        client.log_batch(run_id, params=options[start : start + 100])
    return run_id
