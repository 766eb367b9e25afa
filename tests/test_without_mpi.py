"""One process needs no MPI: a Python without it trains; ranks that were launched are told what to install."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from shardtrain.islands.mpi_library import LIBRARY, NO_WARNING, library_environment

ROOT = Path(__file__).parents[1]
SITE = Path(sysconfig.get_path("purelib"))

PROGRAM = """
import os, sys
from shardtrain import cli
sys.stderr = sys.stdout
for line in sys.stdin.read().splitlines():
    code, variables, *words = line.split()
    given = dict(each.split("=") for each in variables.split(",") if each != "-")
    os.environ.update(given)
    print(f"--- {line}", flush=True)
    assert cli.main(words) == int(code), line
    for name in given:
        del os.environ[name]
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
LAUNCHED = "PMI_RANK=0,PMI_SIZE=2,MPI_LOCALRANKID=0,MPI_LOCALNRANKS=2"


def make_environment(folder: Path, *lines: str | Path) -> Path:
    """The Python of a new environment that finds packages where the lines of a .pth file say."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / SITE.relative_to(sys.prefix) / "here.pth").write_text("\n".join(map(str, lines)) + "\n")
    return folder / "bin/python"


def test_a_lone_process_trains_and_launched_ranks_are_told_what_to_install(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in SITE.iterdir():
        if not path.name.lower().startswith(("mpi4", "mpich", "openmpi", "__editable__")):
            (packages / path.name).symlink_to(path)
    python = make_environment(tmp_path / "environment", packages, ROOT)
    (tmp_path / "run.py").write_text(RUN)
    for number in range(40):
        (tmp_path / f"text{number}.py").write_text(f"# a text of some length, number {number}\n" * 20)
    commands = [
        "0 - train run.py --run-dir out",
        "0 - inspect run.py --mesh fsdp=2 --devices 2",
        "0 - checkpoint ls out",
        f"2 {LAUNCHED} train run.py --run-dir two",
        "2 - launch --islands 2 -- train run.py",
        # elastic islands start all the same
        "2 - launch --elastic 1..2 -- train nope.py",
        "0 - doctor --only mpi,versions --json",
    ]
    environ = {**os.environ, "PATH": "/usr/bin:/bin", **BATCH_SYSTEM}
    done = subprocess.run(
        [python, "-c", PROGRAM], cwd=tmp_path, env=environ, input="\n".join(commands), text=True, timeout=900,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    said = done.stdout.split("--- ")[1:]
    assert [text.partition("\n")[0] for text in said] == commands
    assert "step 2/2" in said[0]
    launched = said[3].partition("\n")[2]
    assert launched.startswith("shardtrain train: several processes were launched, and MPI cannot be loaded")
    assert "Install shardtrain[mpi] (README, Installing)" in launched
    assert "install shardtrain[mpi], which brings one" in said[4]
    assert "there is no run file nope.py" in said[5]
    rows = {row["what"]: row for row in json.loads(said[6].partition("\n")[2])["rows"]}
    assert rows["library"]["found"] == "not installed: mpi4py, mpi4jax"
    assert (rows["library"]["verdict"], rows["packages"]["verdict"]) == ("note", "ok")


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
