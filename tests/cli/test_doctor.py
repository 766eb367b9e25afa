"""`shardtrain doctor` itself: alone, under mpiexec, launched, on folders that cannot be written."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from shardtrain import cli

DOCTOR = [sys.executable, "-m", "shardtrain", "doctor"]


def run(folder, *words, before=(), after=()):
    environ = {**os.environ, "XLA_FLAGS": "", "PYTHONWARNINGS": "error", "COLUMNS": "140"}
    done = subprocess.run(
        [*before, *(after or DOCTOR), *words], cwd=folder, env=environ, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def mpiexec(number):
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    command = shutil.which("mpiexec", path=path)
    assert command is not None
    return [command, "-n", str(number)]


@pytest.mark.full
def test_alone_and_quick_every_check_but_the_measurements_is_in_the_table(tmp_path):
    code, out, err = run(tmp_path, "--quick")
    assert (code, err) == (0, "")
    checks = set(re.findall(r"^  (\w+): ", out, re.MULTILINE))
    assert checks == {"names", "ports", "mpi", "versions", "devices", "binding", "files"}
    assert "0 wrong" not in out
    assert re.search(r"^took .* s: names .*, files [\d.]+$", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


def test_under_mpiexec_there_is_one_table_of_all_ranks_with_measurements(tmp_path, warm_python):
    words = ["--json", "--only", "names,ports,binding,files,rates,links", "--cpu-devices", "2"]
    code, out, err = run(
        tmp_path, *words, before=mpiexec(2), after=[*warm_python, "-m", "shardtrain", "doctor"]
    )
    assert code == 0, err
    data = json.loads(out)
    assert len(data["ranks"]) == len(data["facts"]["rates"]) == 2
    rows = {(row["check"], row["what"]): row for row in data["rows"]}
    assert rows["files", "shared"]["found"].startswith("all 2 ranks see the same folder")
    assert rows["files", "shared"]["found"].endswith("and its lock")
    assert rows["rates", "float32 products"]["found"].startswith("4 x cpu: ")
    assert rows["links", "devices"]["found"].startswith("2 pairs: ")
    assert rows["links", "ranks on one host"]["found"].startswith("1 pair: 8 B in ")
    assert rows["links", "sum over ranks"]["verdict"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_launched_islands_end_together_with_the_code_of_what_is_wrong(tmp_path, warm_shardtrain):
    (tmp_path / "file").touch()
    launch = [*warm_shardtrain, "launch", "--islands", "2", "--logs", "logs", "--", "doctor"]
    code, out, err = run(tmp_path, "--only", "files", "--run-dir", "file", "--quick", after=launch)
    assert code == 1
    assert out.count("what to do") == 1
    assert "a file is in its place" in re.sub(r"\s+", " ", out)
    assert "MPI_Abort" not in out + err


def test_ranks_of_another_mpi_are_alone_and_the_first_says_so(tmp_path, monkeypatch):
    names = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    for name in list(os.environ):
        if name.startswith("OMPI_COMM_WORLD_"):
            monkeypatch.delenv(name)
    from mpi4py import MPI

    other = "PMI" if "Open MPI" in MPI.Get_library_version() else "OMPI_COMM_WORLD"
    local = {"PMI": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")}.get(other, ())
    for (name, value), own in zip(names.items(), (None, None, *(local or (None, None))), strict=True):
        monkeypatch.setenv(own or f"{other}_{name}", value)
    code, out, _ = run(tmp_path, "--only", "mpi", "--quick", "--json")
    row = json.loads(out)["rows"][0]
    assert (code, row["verdict"]) == (1, "wrong")
    assert "each of 2 ranks would be alone" in row["found"]
    monkeypatch.setenv(f"{other}_RANK", "1")
    assert run(tmp_path, "--only", "mpi", "--quick") == (0, "", "")


MOUNTED = """
mount -t tmpfs -o {options} none {folder} && {{ {fill} ; exec {doctor}; }}
"""


@pytest.mark.parametrize(
    ("options", "fill", "what", "do"),
    [
        ("ro", "true", "run folder", "it is mounted read-only"),
        ("size=64k", "head -c 64k /dev/zero > {folder}/full", "small files", "it is full"),
    ],
)
def test_folders_that_cannot_be_written_are_wrong(tmp_path, options, fill, what, do):
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount a file system of his own")
    (tmp_path / "disk").mkdir()
    doctor = " ".join([*DOCTOR, "--only files --quick --json --run-dir disk"])
    script = MOUNTED.format(options=options, folder="disk", doctor=doctor, fill=fill.format(folder="disk"))
    code, out, err = run(tmp_path, before=alone, after=["sh", "-c", script])
    assert code == 1, err
    rows = {row["what"]: row for row in json.loads(out)["rows"]}
    assert rows[what]["verdict"] == "wrong"
    assert rows[what]["do"].startswith(do)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--only", "name"], "there is no check 'name' (did you mean 'names'?)"),
        (["--patience", "0"], "--patience is 0; use seconds above 0"),
        (["--patience", "nan"], "--patience is nan; use seconds above 0"),
        (["--patience", "inf"], "--patience is inf; use seconds above 0"),
        (["--quickly"], "--quickly"),
    ],
)
def test_mistakes_end_with_code_2(words, text, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor", *words])
    assert stop.value.code == 2
    assert text in re.sub(r"[\s│]+", " ", capsys.readouterr().err)
