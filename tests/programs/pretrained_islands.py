"""Start from a folder of Hugging Face on two islands: as replicas, and as stages of a pipeline."""

import functools
import sys
from pathlib import Path

import jax
import numpy as np
from fine_tuning import close, run_of
from flax import nnx
from island_runs import ISLANDS, make_train

import shardtrain as st
from shardtrain.models.lora import Lora
from shardtrain.report.sinks.json_lines import read_jsonl

BASE, FOLDER = Path(sys.argv[1]), Path(sys.argv[2])
RUN = run_of(
    st.read_pretrained(BASE, lora=Lora(rank=2, on=("q", "v"))),
    start_from=st.StartFrom(checkpoint=BASE),
    log_every=1,
    steps=2,
)
STRATEGIES = {
    "replicas": st.Strategy(),
    "stages": st.Strategy(across=st.Across(axis="pipeline"), accumulate=2),
}

rank = ISLANDS.placement.island
losses, trained = {}, {}
for name, strategy in STRATEGIES.items():
    trained[name] = jax.device_get(make_train(RUN, FOLDER)(name, strategy=strategy)[0].state.params)
    if rank == 0:
        losses[name] = [line["train/loss"] for line in read_jsonl(FOLDER / name / "metrics.jsonl")]
whole, mine = trained["replicas"], trained["stages"]
# a block each, and what stands before the first or behind the last
close(mine["blocks"], jax.tree.map(lambda x: x[rank : rank + 1], whole["blocks"]))
rest = {name: x for name, x in mine.items() if name != "blocks"}
close(rest, {name: whole[name] for name in rest})
assert ("embedding" in rest) == (rank == 0)
if rank == 0:
    np.testing.assert_allclose(losses["stages"], losses["replicas"], rtol=1e-5)
# what is frozen is that of the folder, bit by bit
model = nnx.to_pure_dict(nnx.state(st.load(BASE, st.read_pretrained(BASE)), nnx.Param))
for path, x in jax.tree.leaves_with_path(model):
    found = functools.reduce(lambda node, key: node[key.key], path, whole)
    np.testing.assert_array_equal(found, x, err_msg=str(path))
