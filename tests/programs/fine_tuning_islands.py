"""Train with frozen parameters on two islands, as replicas and by deltas; stages: `pretrained_islands.py`."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from fine_tuning import CONSTANT, by_hand, close, initial, run_of
from rich.console import Console
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.membership import join
from shardtrain.optim.optimizer import Optimizer
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

FOLDER = Path(sys.argv[1])
ISLANDS = join()
assert ISLANDS is not None
RUN = run_of(
    TinyConfig(num_layers=2),
    freeze=("embedding", "*/up"),
    optimizer=Optimizer(name="sgd", learning_rate=CONSTANT, clip=100.0),
    log_every=1,
)
STRATEGIES = {
    "replicas": Strategy(),
    "deltas": Strategy(synchronisation=Synchronisation(on="deltas")),
}

before, wanted = initial(RUN), by_hand(RUN)
for name, strategy in STRATEGIES.items():
    run = replace(RUN, strategy=strategy, run_dir=FOLDER / name)
    params = jax.device_get(train(run, Console(file=io.StringIO()), ISLANDS).state.params)
    np.testing.assert_array_equal(params["embedding"], before["embedding"])
    close(params, wanted)
    if ISLANDS.is_first:
        sent = max(line["bytes/islands"] for line in read_jsonl(FOLDER / name / "metrics.jsonl"))
        # the embedding alone has 8 KiB; what is trained has 1 KiB
        sys.stdout.write(f"{name} {sent < before['embedding'].nbytes}\n")
