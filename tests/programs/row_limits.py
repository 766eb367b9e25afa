"""Two islands with a limit of the rows that each gets; args are a folder and a text.

Prints, of this island, the real rows of its batches in each run, and what was printed or refused.
"""

import json
import sys
from pathlib import Path

import numpy as np
from island_runs import IS_FIRST, make_run, make_train

from shardtrain.islands.options import Across
from shardtrain.train_step.sync.local_steps import EveryStep
from shardtrain.trainer import evaluation, row_shares
from shardtrain.trainer.strategy import Strategy

FOLDER, TEXT = Path(sys.argv[1]), Path(sys.argv[2])
train_run = make_train(make_run(TEXT, batch=16, steps=3, evaluate_every=None), FOLDER)
found: dict = {}
rows: list[int] = []
step = EveryStep.__call__


def counted(self, state, batch):
    rows.append(int(np.asarray(batch["weights"]).sum()))
    return step(self, state, batch)


EveryStep.__call__ = counted  # type: ignore[method-assign]

evaluated: list[int] = []
make_evaluate = evaluation.make_evaluate


def make_counted(*arguments):
    evaluate = make_evaluate(*arguments)

    def counted(state, batch, *numbers):
        evaluated.append(batch["weights"].size)
        return evaluate(state, batch, *numbers)

    return counted


evaluation.make_evaluate = make_counted


def run(name: str, growth: str = "", **across: object) -> None:
    rows.clear()
    evaluated.clear()
    strategy = Strategy(across=Across(**across))  # type: ignore[arg-type]
    try:
        _, text = train_run(name, strategy=strategy, batch_growth=growth)
    except ValueError as error:
        text = str(error)
    found[name] = [sorted(set(rows)), text, sorted(set(evaluated))]


run("given", shares=(3.0, 1.0), share_limits=(5, 16))
run("measured", shares="auto", share_limits=(5, 16))
run("too few", share_limits=(5, 8))
run("too many", share_limits=(5, 8, 8))

# a device of island 0 has the memory of 6 rows and a half; of processors nothing is known without a limit
memory = {"bytes": 1 << 50}
measured: list[int] = []
fit_rows = row_shares.fit_rows


def recorded(program_bytes, rows, *arguments):
    measured[:] = [program_bytes(1), (program_bytes(rows) - program_bytes(1)) // (rows - 1)]
    return fit_rows(program_bytes, rows, *arguments)


row_shares.fit_rows = recorded
row_shares.device_memory_bytes = lambda coordination: memory["bytes"]
run("enough", shares=(3.0, 1.0), share_limits="auto")
if IS_FIRST:
    memory["bytes"] = measured[0] + measured[1] * 11 // 2
run("little", shares=(3.0, 1.0), share_limits="auto")
run("grown", "1:2", shares=(3.0, 1.0), share_limits="auto")
run("grown freely", "1:2", shares=(3.0, 1.0))
memory["bytes"] = measured[0] - 1 if IS_FIRST else 1 << 50
found["least"] = measured[0]
run("none", shares=(3.0, 1.0), share_limits="auto")
sys.stdout.write(json.dumps(found))
