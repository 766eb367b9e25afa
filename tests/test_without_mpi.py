"""One process needs no MPI: a Python without it trains; ranks that were launched are told what to install."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from shardtrain.islands.mpi_library import LIBRARY, NO_WARNING, library_environment

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_path("purelib"))

PROGRAM = """
import sys
from shardtrain import cli
for words in sys.stdin.read().splitlines():
    assert cli.main(words.split()) == 0, words
assert not [name for name in sys.modules if name.startswith(("mpi4py", "mpi4jax"))]
"""

RUN = """
from pathlib import Path
from shardtrain import Run, Text
from tiny_language_model import TinyConfig

def run():
    data = Text(seq=8, paths=(Path(__file__).parent,))
    return Run(model=TinyConfig(), data=data, batch=8, steps=2, evaluate_batches=1)
"""

BATCH_SYSTEM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
LAUNCHED = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def make_environment(folder: Path, *lines: str | Path) -> Path:
    """The Python of a new environment that finds packages where the lines of a .pth file say."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / SITE.relative_to(sys.prefix) / "here.pth").write_text("\n".join(map(str, lines)) + "\n")
    return folder / "bin/python"


@pytest.fixture(scope="module")
def without_mpi(tmp_path_factory):
    """Run Python where no MPI is installed; given (words, stdin="", **variables)."""
    folder = tmp_path_factory.mktemp("without_mpi")
    packages = folder / "packages"
    packages.mkdir()
    for path in SITE.iterdir():
        if not path.name.lower().startswith(("mpi4", "mpich", "openmpi", "__editable__")):
            (packages / path.name).symlink_to(path)
    python = make_environment(folder / "environment", packages, ROOT)
    (folder / "run.py").write_text(RUN)
    for number in range(40):
        (folder / f"text{number}.py").write_text(f"# a text of some length, number {number}\n" * 20)

    def run(*words, stdin="", **variables):
        environ = {**os.environ, "PATH": "/usr/bin:/bin", **variables}
        return subprocess.run(
            [python, *words], cwd=folder, env=environ, input=stdin, capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip

    return run


def test_a_lone_process_trains_inspects_and_examines_without_mpi(without_mpi):
    commands = ["train run.py --run-dir out", "inspect run.py --mesh fsdp=2 --devices 2", "checkpoint ls out"]
    commands += ["doctor --only mpi,versions --json"]
    done = without_mpi("-c", PROGRAM, stdin="\n".join(commands), **BATCH_SYSTEM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    rows = {row["what"]: row for row in json.loads(done.stdout[done.stdout.index('{\n "verdict"') :])["rows"]}
    assert rows["library"]["found"] == "not installed: mpi4py, mpi4jax"
    assert (rows["library"]["verdict"], rows["packages"]["verdict"]) == ("note", "ok")


def test_launched_ranks_are_told_what_to_install(without_mpi):
    done = without_mpi("-m", "shardtrain", "train", "run.py", "--run-dir", "two", **LAUNCHED)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shardtrain train: several processes were launched, and MPI cannot be load")
    assert "Install shardtrain[mpi] (README, Installing)" in done.stderr
    assert "Traceback" not in done.stderr
    done = without_mpi("-m", "shardtrain", "launch", "--islands", "2", "--", "train", "run.py")
    assert done.returncode == 2
    assert "install shardtrain[mpi], which brings one" in done.stderr
    # elastic islands start all the same
    done = without_mpi("-m", "shardtrain", "launch", "--elastic", "1..2", "--", "train", "nope.py")
    assert (done.returncode, "there is no run file nope.py" in done.stderr) == (2, True)


def test_mpi_is_found_from_an_environment_on_top_of_its_own(tmp_path):
    """As `uv run --with` makes them: mpi4py looks for the library below the Python that runs alone."""
    python = make_environment(tmp_path, f"import site; site.addsitedir({str(SITE)!r})")
    program = "from shardtrain.islands.bridge import world; print('size', world().size)"
    environ = {name: value for name, value in os.environ.items() if name != LIBRARY}
    done = subprocess.run(
        [python, "-c", program], env=environ, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.stdout == "size 1\n", done.stderr


def test_variables_that_are_set_are_kept():
    prefix = str(Path(sys.prefix) / "elsewhere")
    home = Path(sys.prefix) / "lib"
    quiet = {NO_WARNING: "1"}
    assert library_environment({}, prefix) == {**quiet, LIBRARY: f"{home}{os.pathsep}"}
    assert library_environment({}) == library_environment({LIBRARY: "/opt/lib"}, prefix) == quiet
    assert library_environment({NO_WARNING: "0"}) == {}
