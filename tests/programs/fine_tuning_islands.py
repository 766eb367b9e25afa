"""Train with frozen parameters on two islands, as replicas and by deltas; stages: `pretrained_islands.py`."""

import sys
from pathlib import Path

import jax
import numpy as np
from fine_tuning import CONSTANT, by_hand, close, initial, run_of
from island_runs import IS_FIRST, make_train
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.optim.optimizer import Optimizer
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.strategy import Strategy

FOLDER = Path(sys.argv[1])
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
    params = jax.device_get(make_train(RUN, FOLDER)(name, strategy=strategy)[0].state.params)
    np.testing.assert_array_equal(params["embedding"], before["embedding"])
    close(params, wanted)
    if IS_FIRST:
        sent = max(line["bytes/islands"] for line in read_jsonl(FOLDER / name / "metrics.jsonl"))
        # the embedding alone has 8 KiB; what is trained has 1 KiB
        sys.stdout.write(f"{name} {sent < before['embedding'].nbytes}\n")
