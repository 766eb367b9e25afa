"""What XLA refuses ends a run with a sentence: the reason, the operation and the change to make."""

import textwrap

import jax
import pytest

from shardtrain import cli
from shardtrain.errors.compiler_errors import compiler_text

RUN = """
    import jax
    import numpy as np
    from flax import nnx
    from jax.sharding import PartitionSpec
    from shardtrain import Layout, Run, Strategy, classification_loss

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.head = nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, images):
            specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={"tensor"})
            return self.head(jax.shard_map(lambda x: x * 2, **specs, check_vma=False)(images))

    class Data:
        def train(self, folder):
            return [{"image": np.zeros(4, np.float32), "label": np.int32(i % 2)} for i in range(8)]

        def heldout(self, folder):
            return None

    def run():
        strategy = Strategy(layout=Layout(mesh={"data": 2, "tensor": 2, "fsdp": 2}, unnamed="replicate"))
        return Run(model=Net, data=Data(), loss=classification_loss, batch=8, strategy=strategy)
"""


def test_a_platform_that_jax_does_not_know(monkeypatch, capsys):
    words = (
        "Unable to initialize backend 'tpuu': Backend 'tpuu' is not in the list of known backends: ['cpu']."
    )
    told = f"{words} (set JAX_PLATFORMS='' to automatically choose an available backend)"

    def fail(*_, **__):
        raise RuntimeError(told)

    monkeypatch.setattr("shardtrain.cli._command", fail)
    assert cli.main(["train", "run.py"]) == 1
    assert capsys.readouterr().err.startswith(
        "shardtrain train: jax cannot start the platform 'tpuu' of JAX_PLATFORMS: Backend 'tpuu' is not in"
        " the list of known backends: ['cpu']. Name one that is installed, such as JAX_PLATFORMS=cpu"
    )


@pytest.fixture
def with_places():
    """Programs say which lines they come from, which tests go without."""
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


def test_a_run_names_the_operation_and_the_line_of_the_model(with_places, tmp_path, capfd):
    (tmp_path / "net.py").write_text(textwrap.dedent(RUN))
    code = cli.main(
        ["train", str(tmp_path / "net.py"), "--run-dir", str(tmp_path / "run"), "--check-layout", "off"]
    )
    error = capfd.readouterr().err
    assert code == 2, error
    assert error.startswith("shardtrain train: the compiler refused the program: 'sdy.manual_computation' op")
    assert f"called at {tmp_path / 'net.py'}:14; a shard_map of the model" in error
    assert "Traceback" not in error


def test_what_xla_says_is_quoted_with_a_change_to_make():
    refused = jax.jit(lambda x: x + 1, compiler_options={"no_such_option": True})
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        refused(1.0)
    text = compiler_text(error.value)
    assert text is not None
    assert text.startswith("the compiler refused the program: INVALID_ARGUMENT: No such compile option")
    assert text.endswith("try a mesh of one axis (--mesh data=-1), or write the operation in another way")


def test_errors_of_others_are_left_alone():
    assert compiler_text(ValueError("no")) is None
