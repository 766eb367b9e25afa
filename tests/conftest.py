"""8 simulated CPU devices for every test, and compiled programs that are kept between runs."""

import difflib
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
gc.disable()  # until all tests are imported
TESTS = Path(__file__).parent
HELPERS = str(TESTS / "helpers")
"""Modules that tests, and programs and run files of tests, import by name."""
sys.path.insert(0, HELPERS)
from quick_compilation import QUICK_COMPILATION

# DEFAULT_OPTIMIZATION=1 leaves XLA's own level; one test runs the central tests so
FLAGS = () if os.environ.get("DEFAULT_OPTIMIZATION") else QUICK_COMPILATION
SLOWEST_FIRST = (
    "test_tutorial.py",
    "elastic/test_train.py",
    "test_central.py",
    "train_step/test_pipeline.py",
    "test_published_models.py",
    "trainer/test_islands_train.py",
    "plan/test_traffic.py",
    "test_documents.py",
    "trainer/test_waves.py",
    "functional/test_context_attention.py",
    "fuzz/test_layouts.py",
    "test_presets.py",
    "cli/test_islands.py",
    "trainer/test_experts.py",
    "plan/test_planner.py",
    "trainer/test_train.py",
    "faults/test_kills.py",
    "models/test_packed_rows.py",
    "trainer/test_pretrained.py",
    "checkpoints/test_restore_matrix.py",
    "test_own_runs.py",
    "checks/test_first_batch.py",
    "combine/test_synchronisation.py",
    "trainer/test_stages_train.py",
    "test_central_meshes.py",
    "combine/test_contract.py",
    "test_site.py",
    "combine/test_replicas.py",
    "test_without_mpi.py",
    "train_step/test_stage_step.py",
    "models/test_gpt.py",
    "trainer/test_fine_tuning.py",
    "faults/test_hang.py",
    "checks/test_row_draws.py",
    "train_step/test_island_programs.py",
    "models/test_experts.py",
    "faults/test_islands.py",
    "combine/test_adasum.py",
    "trainer/test_layout_check.py",
    "report/test_tracked_run.py",
    "trainer/test_trained_only.py",
    "test_options.py",
    "trainer/test_best.py",
    "train_step/test_step.py",
)
"""Files of tests that take longest without `--full`, of 20 s to two minutes each.

Those of several ranks, each of which can take a core, come one at a time between others.
"""

DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), DEVICES, *FLAGS])
os.environ["PJRT_NPROC"] = "64"  # as `--cpu-devices 8` sets it: devices that wait keep their threads
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
# ten frames of Python at every operation would be copied at each step of a compilation
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
os.environ["PYTHONPATH"] = os.pathsep.join([HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])])
# a rank of MPICH that waits sleeps between its looks: it leaves its core to those that work
os.environ["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
# without their bytecode each of the hundreds of processes would compile all modules anew, 2 s of CPU
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# who starts the tests in the background may have switched these off, and processes of the tests inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hypothesis
import jax
import numpy as np
import pytest
from compiled_programs import keep_every_program

pytest_plugins = ["retry_alone", "guarded_readers"]

keep_every_program()
# how long an example takes says nothing where other work shares the cores
hypothesis.settings.register_profile(
    "shared cores", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("shared cores")


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run every test and the whole grid of each; without it, cases marked `full` are left out",
    )


def pytest_xdist_auto_num_workers(config):
    """One process more than there are cores, as some tests wait: for a hang to be noticed, for a disk."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "full: a slow case, or one of further pairs of values, which `--full` runs"
    )


def pytest_collection_modifyitems(config, items):
    """Leave out what only `--full` runs, and start the slowest files first: the processes end together."""
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    slowest = {name: number for number, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: slowest.get(item.path.relative_to(TESTS).as_posix(), len(slowest)))


def pytest_collection_finish(session):
    """Collect garbage rarely, and nothing of what was imported: it was a fifteenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()


@contextmanager
def runs_on_one_device():
    from shardtrain.sharding.axis_sizes import axis_sizes
    from shardtrain.sharding.mesh import make_mesh
    from shardtrain.trainer import island_run, setup

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_mesh", lambda layout: make_mesh(layout, jax.devices()[:1]))
        patch.setattr(island_run, "axis_sizes", lambda mesh, num_devices: axis_sizes(mesh, 1))
        yield


@pytest.fixture(scope="session")
def on_one_device():
    """Runs inside it have one of the eight devices: what they compile and step is a third as much work."""
    return runs_on_one_device


@pytest.fixture
def one_device():
    """All runs of a test have one device."""
    with runs_on_one_device():
        yield


@pytest.fixture(autouse=True)
def without_curves(monkeypatch):
    """Runs of tests draw no loss curve: it takes a tenth of their time. Fixtures of modules draw theirs."""
    train = sys.modules.get("shardtrain.trainer.train")
    if train is not None:
        monkeypatch.setattr(train, "draw_curve", lambda folder, output: None)


@pytest.fixture(autouse=True)
def without_few_rows(request, monkeypatch):
    """Runs of tests compute no few rows, which takes half a second; test_row_coupling.py does."""
    loss_program = sys.modules.get("shardtrain.checks.loss_program")
    if loss_program is not None and request.path.name != "test_row_coupling.py":
        monkeypatch.setattr(loss_program, "_find_unexplained_difference", lambda *_: "")


RTOL, ATOL = 1e-5, 1e-6
"""Of the central law, in float32: how far two programs that compute the same may be apart."""


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """The simulated devices are asserted, never skipped."""
    assert jax.device_count() == 8, jax.devices()


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    """(got, expected): trees of the same structure, whose numbers are those of the central law."""

    def assert_same(got, expected):
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, RTOL, ATOL, err_msg=jax.tree_util.keystr(path))

    return assert_same


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory) -> Iterator[list[str]]:
    """Words that stand for `python`, before `-m MODULE` or a program: it starts with everything imported."""
    address = str(tmp_path_factory.mktemp("warm") / "socket")
    program = str(TESTS / "helpers" / "warm_python.py")
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    server = subprocess.Popen([sys.executable, program, address], stdin=subprocess.PIPE, env=environment)
    while not os.path.exists(address):
        assert server.poll() is None
        time.sleep(0.05)
    yield [sys.executable, "-S", "-I", program, address]
    server.communicate()


@pytest.fixture(scope="session")
def warm_shardtrain(warm_python) -> list[str]:
    """Words that stand for `python -m shardtrain`: it, and all ranks that it launches, start so."""
    return [*warm_python, str(TESTS / "helpers" / "warm_launch.py"), warm_python[-1]]


REDIRECT = """
import os, runpy, sys
from mpi4py import MPI
from shardtrain.checks import loss_program

# as `without_few_rows` does
loss_program._find_unexplained_difference = lambda *_: ""
# a rank writes to a file of its own: through one pipe the lines of several would mix
folder, *sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
sys.stdout = open(f"{folder}/{MPI.COMM_WORLD.rank}", "w")
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
"""


@pytest.fixture(scope="session")
def mpiexec(warm_python, tmp_path_factory) -> Callable[..., list[str]]:
    """Run a Python program on several ranks, each with devices of its own; returns the output of each.

    It is given (num_ranks, program text or file, *arguments, devices=1, timeout=900).
    """
    folder = tmp_path_factory.mktemp("mpiexec")
    (folder / "redirect.py").write_text(REDIRECT)
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = shutil.which("mpiexec", path=beside)
    assert command is not None, "no mpiexec: run `uv sync`"

    def run(num_ranks, program, *arguments, devices=1, timeout=900):
        number = len(list(folder.iterdir()))
        if not isinstance(program, Path):
            (folder / f"program{number}.py").write_text(program)
            program = folder / f"program{number}.py"
        outputs = folder / f"outputs{number}"
        outputs.mkdir()
        count = f"--xla_force_host_platform_device_count={devices}"
        words = ["-m", "mpi4py", folder / "redirect.py", outputs, program, *arguments]
        done = subprocess.run(
            [command, "-n", str(num_ranks), *warm_python, *map(str, words)],
            env={
                **os.environ,
                "XLA_FLAGS": " ".join([count, *FLAGS]),
                "PJRT_NPROC": str(8 * devices),
                "MPI4JAX_NO_WARN_JAX_VERSION": "1",
                "PYTHONWARNINGS": "error",
            },
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        texts = [path.read_text() for path in sorted(outputs.iterdir(), key=lambda path: int(path.name))]
        assert done.returncode == 0, "\n".join([*texts, done.stdout, done.stderr])
        assert len(texts) == num_ranks
        return texts

    return run


@pytest.fixture
def assert_snapshot():
    """Compare a text with a committed file of tests/snapshots; `UPDATE_SNAPSHOTS=1` writes the file anew."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "snapshots" / name
        if os.environ.get("UPDATE_SNAPSHOTS"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        lines = (path.read_text().splitlines(), text.splitlines())
        changes = "\n".join(difflib.unified_diff(*lines, "committed", "now", n=0, lineterm=""))
        assert not changes, (
            f"{changes}\n\ntests/snapshots/{name} lists what users rely on. If the change is meant, write it"
            " anew by UPDATE_SNAPSHOTS=1 uv run pytest tests/test_options.py tests/test_api.py, commit it,"
            " and give what was renamed or removed a line in CHANGELOG.md."
        )

    return check
