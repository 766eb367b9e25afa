"""Runs of styled_models.py on islands, compared with the first island alone; args: a folder and names."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from shardtrain.cli.run_file import load_file
from shardtrain.islands.membership import join
from shardtrain.trainer.train import train


def main() -> None:
    islands = join()
    assert islands is not None
    styled = load_file(Path(__file__).with_name("styled_models.py"))
    folder, *names = sys.argv[1:]
    for name in names:
        run = replace(styled.styled_run(name), run_dir=Path(folder) / name)
        found = train(run, Console(quiet=True), islands).state
        if islands.is_first:
            alone = train(replace(run, run_dir=Path(folder) / f"{name} alone"), Console(quiet=True)).state
            traces = [jax.device_get(state.opt_state[0].trace) for state in (found, alone)]
            for (path, a), b in zip(
                jax.tree.leaves_with_path(traces[0]), jax.tree.leaves(traces[1]), strict=True
            ):
                np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=f"{name}{jax.tree_util.keystr(path)}")
    sys.stdout.write(" ".join(names) + "\n")


main()
