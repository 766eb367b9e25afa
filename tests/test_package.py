"""The package as a whole: what is installed, what an import costs, what files say, examples in docstrings."""

import ast
import dataclasses
import doctest
import email
import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from package_source import package_files

import shardtrain as st

ROOT = Path(__file__).parents[1]
PACKAGE_FOLDERS = {
    "shardtrain": ROOT / "shardtrain",
    "shardtrain.models": ROOT / "models",
    "shardtrain.meshes": ROOT / "meshes",
}
"""Package -> its folder; the links in `shardtrain/` to the last two are not walked into."""


def modules():
    """(name, path) of every module, by the only name that it shall be imported by."""
    for package, folder in PACKAGE_FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join([package, *parts]).removesuffix(".__init__"), path


def tracked_files():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the tracked files: its metadata, and the names of its files."""
    folder = tmp_path_factory.mktemp("wheel")
    for path in tracked_files():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, "out"], cwd=folder, check=True, capture_output=True)
    with zipfile.ZipFile(next((folder / "out").glob("*.whl"))) as archive:
        names = archive.namelist()
        text = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    return email.message_from_string(text), set(names)


def test_the_wheel_holds_every_module_once_and_needs_no_mpi(wheel):
    metadata, names = wheel
    assert {name for name in names if name.endswith(".py")} == {
        f"{name.replace('.', '/')}{'/__init__' * (path.name == '__init__.py')}.py" for name, path in modules()
    }
    assert {"shardtrain/py.typed", "shardtrain/meshes/one_host_8_tensor.toml"} <= names
    needed = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert len(needed) > 5
    assert [text for text in needed if re.match(r"mpi|openmpi", text)] == []
    assert {"mpi", "mpi-build", "hf", "plots", "tensorboard"} <= set(metadata.get_all("Provides-Extra"))


def test_the_extra_mpi_brings_what_the_groups_of_a_clone_do():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    assert set(extras["mpi"]) == {*groups["mpi"], *groups["bridge"]}
    built_by = [text for text in extras["mpi"] if not text.startswith("mpi4jax")]
    assert set(extras["mpi-build"]) == {*built_by, *groups["build"]}
    assert {"mpi", "bridge", "build"} <= set(project["tool"]["uv"]["default-groups"])


def test_every_sub_package_is_installed():
    """A package that is not listed is missing from the wheel, and only there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name for name, path in modules() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages
    folders = {path.parent for _, path in modules()}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_data_files_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    others = {
        path
        for folder in PACKAGE_FOLDERS.values()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert {path.name for path in others if not any(path.match(pattern) for pattern in patterns)} == set()


@pytest.mark.parametrize("name", ["models", "meshes"])
def test_links_lead_to_the_folders_beside(name):
    link = ROOT / "shardtrain" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


HEAVY = ("jax", "flax", "optax", "orbax", "numpy", "mpi4py", "mpi4jax", "matplotlib", "rich", "tyro")
VALUES = (
    "shardtrain",
    "shardtrain.axes",
    "shardtrain.sharding.layout_file",
    "shardtrain.sharding.resolve",
    "shardtrain.checkpoints.policy",
    "shardtrain.data",
    "shardtrain.sharding.shares",
    "shardtrain.islands.rank_environment",
    "shardtrain.islands.buckets",
    "shardtrain.islands.options",
    "shardtrain.islands.agreement",
    "shardtrain.elastic.ledger",
    "shardtrain.elastic.member",
    "shardtrain.launch.supervise",
    "shardtrain.pipeline.schedule",
    "shardtrain.pipeline.simulate",
    "shardtrain.pipeline.partition",
    "shardtrain.plan.devices",
    "shardtrain.plan.simulator.task_graph",
)


def test_values_are_imported_without_jax():
    code = f"import sys, {', '.join(VALUES)}; print(sorted(set({HEAVY}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, check=True, text=True
    )
    assert result.stdout == "[]\n"


def test_programs_of_jax_are_read_in_one_package():
    """Elsewhere a closed program is a value that is passed on, and none goes through its equations."""
    found = set()
    for path, source in package_files():
        for node in ast.walk(ast.parse(source)):
            names = [getattr(node, "module", None) or "", getattr(node, "attr", "")]
            names += [each.name for each in getattr(node, "names", ()) if isinstance(each, ast.alias)]
            if {"jax.extend.core", "jax.interpreters", "eqns", "jaxpr_as_fun"} & set(names):
                found.add(path)
    others = {path for path in found if not path.startswith("shardtrain/jaxpr/")}
    # they make primitives of their own
    assert others == {"models/ops/kernel_product.py", "shardtrain/plan/device_calls.py"}


@pytest.mark.parametrize("package", ["shardtrain", "shardtrain.data"])
def test_public_names_load(package):
    module = importlib.import_module(package)
    assert len(module.__all__) == len(set(module.__all__)) > 5
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'trian'"):
        _ = module.trian


def test_every_part_of_a_run_is_a_public_name():
    parts = [field.default for kind in (st.Run, st.Strategy) for field in dataclasses.fields(kind)]
    kinds = {type(part) for part in parts if dataclasses.is_dataclass(part) and not isinstance(part, type)}
    assert len(kinds) > 9
    assert [kind for kind in kinds if getattr(st, kind.__name__, None) is not kind] == []


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: an import with dots"
            yield node.module or ""


def test_models_have_one_import_path():
    """`models.decoder` beside `shardtrain.models.decoder` would be a second copy of every class."""
    files = [path for path in tracked_files() if path.suffix == ".py"]
    assert ROOT / "models" / "decoder.py" in files
    wrong = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in files
        # without the name by itself there is nothing to parse
        if re.search(r"(?<![\w.])(models|meshes)\b", path.read_text())
        for name in imported(path)
        if name.partition(".")[0] in ("models", "meshes")
    ]
    assert wrong == []


def test_the_installed_package_is_this_one():
    for name in ("shardtrain", "shardtrain.models.decoder"):
        file = importlib.import_module(name).__file__
        assert file is not None
        assert Path(file).resolve().is_relative_to(ROOT)


def test_no_file_names_a_path_of_this_machine():
    shared = {Path(name) for name in ("/", "/home", "/tmp", "/opt", "/srv", "/mnt", "/usr", "/var")}
    here = {ROOT, ROOT.parent, Path.home()} - shared
    pattern = "|".join([*(re.escape(f"{path}/") for path in here), r"/(home|Users)/[a-z]\w*/"])
    found = {}
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if match := re.search(pattern, text):
            found[path.relative_to(ROOT).as_posix()] = match[0]
    assert found == {}


@pytest.mark.parametrize(("name", "path"), [pytest.param(*module, id=module[0]) for module in modules()])
def test_examples_in_docstrings(name, path):
    """Every module can be imported; only those with examples are searched for them, which takes longer."""
    module = importlib.import_module(name)
    if ">>>" in path.read_text():
        assert doctest.testmod(module).failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = finder.find(importlib.import_module("shardtrain.sharding.shares"))
    assert sum(len(test.examples) for test in tests) >= 4
