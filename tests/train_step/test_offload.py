"""An optimizer's state in the memory of the host: the same bits as on the device, after a resume too."""

import io

import jax
import numpy as np
import optax
import pytest
from rich.console import Console
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.combine.synchronisation import PRESETS
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.state import shard_on_host
from shardtrain.train_step.step import make_step
from shardtrain.trainer.setup import make_setup

CONFIG = TinyConfig(num_layers=2)


def trained(offload, layout, steps=3):
    """The state and metrics after some steps."""
    model, optimizer = from_nnx(CONFIG), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
    mesh = make_mesh(layout, jax.devices()[:4])
    placement = make_placement(model, optimizer, layout, mesh, offload=offload)
    state, metrics = init_state(model, optimizer, placement), {}
    step = make_step(model, next_token_loss, optimizer, placement)
    for number in range(steps):
        tokens = np.random.default_rng(number).integers(0, CONFIG.vocab, (2, 4, CONFIG.seq + 1))
        batch = {"tokens": tokens.astype(np.int32), "weights": np.ones((2, 4), np.float32)}
        state, metrics = step(state, jax.tree.map(lambda x: jax.device_put(x, placement.batch), batch))
    return state, metrics


def test_steps_are_bitwise_those_of_a_state_on_the_device():
    layout = Layout(mesh={"data": 2, "fsdp": 2}, zero=1)
    expected, metrics = trained("none", layout)
    state, found = trained("optimizer", layout)
    jax.tree.map(np.testing.assert_array_equal, (state, found), (expected, metrics))
    for leaf, other in zip(*map(jax.tree.leaves, (state.opt_state, expected.opt_state)), strict=True):
        assert leaf.sharding.memory_kind == ("pinned_host" if leaf.ndim else "device")
        assert leaf.sharding.spec == other.sharding.spec, "sharded as on the device"
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {"device"}


def run_of(tmp_path, folder, steps, **strategy):
    (tmp_path / "a.txt").write_text("a line of text\n" * 40)
    return st.Run(
        model=CONFIG,
        data=st.Text(paths=(tmp_path / "a.txt",), seq=CONFIG.seq),
        optimizer=optax.contrib.schedule_free_adamw(0.01),
        evaluate_with="schedule_free",
        strategy=st.Strategy(**strategy),
        batch=8,
        steps=steps,
        log_every=1,
        evaluate_every=2,
        run_dir=tmp_path / folder,
    )


@pytest.mark.full
def test_a_run_evaluates_an_average_of_it_and_resumes_with_it_or_without(tmp_path):
    def losses(folder, *parts):
        output = io.StringIO()
        for steps, offload in parts:
            run = run_of(tmp_path, folder, steps, layout=Layout(mesh={"fsdp": -1}), offload=offload)
            st.train(run, Console(file=output, width=200))
        names = ("train/loss", "heldout/loss")
        lines = read_jsonl(tmp_path / folder / "metrics.jsonl")
        return [[line[name] for line in lines if name in line] for name in names], output.getvalue()

    whole, text = losses("whole", (4, "none"))
    assert "in the memory of the host" not in text
    parts, text = losses("parts", (2, "optimizer"), (3, "none"), (4, "optimizer"))
    assert "per device, in the memory of the host" in text
    assert parts[0] == whole[0]
    assert parts[1][-1] == whole[1][-1]


class OfNoHost:
    """A device that reads its own memory alone."""

    device_kind = "toaster"

    def addressable_memories(self):
        return [type("Memory", (), {"kind": "device"})]


def test_what_cannot_keep_it_there_is_refused(tmp_path):
    mesh = type("Mesh", (), {"devices": np.array([OfNoHost()])})
    with pytest.raises(ValueError, match="memory pinned_host of the host, and toaster has device; use --off"):
        shard_on_host((), (), mesh)  # type: ignore[arg-type]
    run = run_of(tmp_path, "run", 1, offload="optimizer", synchronisation=PRESETS["local-sgd"])
    with pytest.raises(ValueError, match="offload is 'optimizer', which needs islands that combine"):
        make_setup(run, num_islands=2)
    tokens = np.zeros((4, CONFIG.seq + 1), np.int32)
    in_mesh = run_of(tmp_path, "run", 1, remat="offload", layout=Layout(mesh={"pipeline": 2, "data": -1}))
    with pytest.raises(ValueError, match="remat is 'offload'"):
        make_setup(in_mesh, microbatch={"tokens": tokens, "weights": np.ones(4, np.float32)})
