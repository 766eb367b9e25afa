"""The runs of published_models.py on islands, each with half of every batch; args are a folder and names."""

import io
import sys
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from shardtrain.cli.run_file import load_run
from shardtrain.cli.run_options import parse_run
from shardtrain.data import Batches
from shardtrain.islands.membership import join
from shardtrain.trainer.train import train

FILE = Path(__file__).with_name("published_models.py")


def main() -> None:
    islands = join()
    assert islands is not None
    load_run(f"{FILE}:plain")
    published = sys.modules["published_models"]
    for name in sys.argv[2:]:
        make = published.CASES[name]
        function = "synchronised_resnet" if name == "resnet" else name
        run, _ = parse_run("train", [f"{FILE}:{function}", "--run-dir", f"{sys.argv[1]}/{name}"])
        shown = io.StringIO()
        console = Console(file=shown, width=200)
        state = train(run, console, islands).state
        if not islands.is_first:
            continue
        found = Batches(source=run.data, batch=run.batch, seed=run.seed).iterate()
        batches = [batch for batch, _ in (next(found) for _ in range(run.steps))]
        # islands have batch statistics of their own, which they say where others were asked for
        warned = "over the axis 'replicas': islands do not" in shown.getvalue()
        assert warned == (name == "resnet")
        expected = published.plain_steps(make(), batches, 2 if name == "resnet" else 1)[1:]
        got = jax.device_get((state.opt_state[0].trace, state.model_state))
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=f"{name}{jax.tree_util.keystr(path)}")
    sys.stdout.write(" ".join(sys.argv[2:]) + "\n")


main()
