"""The public API: names and signatures of the modules in docs/reference.py, as a committed list."""

import ast
import importlib.util
from pathlib import Path

import pytest

import shardtrain

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.fixture(scope="module")
def reference():
    """docs/reference.py, which lists the public modules."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def definition(reference, module, name):
    """The syntax tree of a public name, followed through the packages that import it; None: no definition."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
            return node
    origin = reference.public(module).get(name, module)
    return None if origin == module else definition(reference, origin, name)


def signatures(name, node):
    """A line for a function; for a class one for itself, each field and each public method."""
    if isinstance(node, FUNCTIONS):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return [f"{name}({ast.unparse(node.args)}){returns}"]
    if node is None:
        return [name]
    bases = ", ".join(map(ast.unparse, node.bases))
    lines = [f"class {name}({bases})" if bases else f"class {name}"]
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and not ast.unparse(item.target).startswith("_"):
            lines.append(f"{name}.{ast.unparse(item)}")
        elif isinstance(item, FUNCTIONS) and (not item.name.startswith("_") or item.name == "__init__"):
            lines += signatures(f"{name}.{item.name}", item)
    return lines


def test_public_names_and_signatures_are_those_committed(reference, assert_snapshot):
    modules = [
        part
        for module in reference.REFERENCE
        for part in [f"{module}.{name}" for name in reference.MODULES.get(module, ())] or [module]
    ]
    lines = []
    for module in modules:
        names = sorted(reference.public(module))
        assert names, module
        for name in names:
            lines += signatures(f"{module}.{name}", definition(reference, module, name))
    assert len(lines) > 300
    assert_snapshot("api.txt", "\n".join(lines) + "\n")


def test_an_earlier_name_is_refused_with_the_name():
    with pytest.raises(AttributeError, match="no attribute 'pretrained'; its name is read_pretrained now"):
        shardtrain.pretrained  # noqa: B018
