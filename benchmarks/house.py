"""Measure how a checkout of shardtrain is built: packages, import layers, long files and functions, comments.

    uv run python benchmarks/house.py [FOLDER]      # default: this checkout; another commit: git worktree add

Prints one Markdown table row per figure. Needs no jax. Figures: docs/benchmarks/house.md.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "shardtrain"
MODELS = ("models", "meshes")
"""Folders beside the package, reached through links in it: only the lengths of their files are counted."""


def main(folder: Path) -> None:
    modules = {
        name: path for name, path in modules_of(folder) if name.split(".")[1:2] not in [[m] for m in MODELS]
    }
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    beside = {
        f"{each}.{path.stem}": path.read_text(encoding="utf-8")
        for each in MODELS
        for path in (folder / each).glob("*.py")
    }
    lines = {name: len(text.splitlines()) for name, text in {**texts, **beside}.items()}
    arrows = arrows_between_units(modules, trees)
    functions = sorted(
        (num_lines(node), f"{name}.{node.name}")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    classes = {
        f"{name}.{node.name}": node
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    methods = sorted((len(functions_of(node)), name) for name, node in classes.items())
    constructors = sorted((num_positional(node), name) for name, node in classes.items())
    comments, code = map(sum, zip(*(comment_and_code_lines(text) for text in texts.values()), strict=True))
    units = {unit(name) for name in modules} - {PACKAGE}
    packages = {unit(name) for name, path in modules.items() if path.parent != folder / PACKAGE} - {PACKAGE}
    figures = {
        "packages at the top": len(packages),
        "other modules at the top": len(units - packages),
        "import layers": num_layers(units, arrows),
        "arrows between packages and modules at the top": len(arrows),
        "files": len(modules),
        "files over 300 lines, with models/ and meshes/": sum(n > 300 for n in lines.values()),
        "longest file": "{1}, {0} lines".format(*max((n, name) for name, n in lines.items())),
        "functions over 60 lines": sum(n > 60 for n, _ in functions),
        "longest function": "{1}, {0} lines".format(*functions[-1]),
        "most methods of a class": "{1}, {0}".format(*methods[-1]),
        "most positional parameters of a constructor": "{1}, {0}".format(*constructors[-1]),
        "comment lines per 100 lines of code": f"{100 * comments / code:.1f}",
    }
    print("\n".join(f"| {what} | {figure} |" for what, figure in figures.items()))


def modules_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every module of the package."""
    for path in sorted((folder / PACKAGE).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def unit(name: str) -> str:
    """The package or module at the top that a module belongs to."""
    return name.split(".")[1] if "." in name else PACKAGE


def arrows_between_units(modules: dict[str, Path], trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Return (importer, imported) of packages and modules at the top, imports for type checkers included."""
    arrows = set()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            found = []
            if isinstance(node, ast.ImportFrom) and node.module:
                found = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            for each in found:
                if each.startswith(f"{PACKAGE}.") and unit(each) not in MODELS:
                    arrows.add((unit(name), unit(each)))
    known = {unit(name) for name in modules}
    return {(a, b) for a, b in arrows if a != b and a not in (PACKAGE, "__main__") and b in known}


def num_layers(units: set[str], arrows: set[tuple[str, str]]) -> int:
    """The length of the longest chain of imports."""
    below = {each: {b for a, b in arrows if a == each} for each in units}
    depth: dict[str, int] = {}

    def depth_of(each: str) -> int:
        if each not in depth:
            depth[each] = 1 + max((depth_of(other) for other in below[each]), default=0)
        return depth[each]

    return max(map(depth_of, units))


def functions_of(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = node.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def num_positional(node: ast.ClassDef) -> int:
    """Parameters that a constructor takes by position, without `self`; 0 where it is generated."""
    made = [each for each in functions_of(node) if each.name == "__init__"]
    return max((len(each.args.posonlyargs + each.args.args) - 1 for each in made), default=0)


def comment_and_code_lines(text: str) -> tuple[int, int]:
    """Lines that are a comment, and lines of code: neither blank, comment nor docstring."""
    comments, code, strings = set(), set(), set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            strings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    skipped = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
            comments.add(token.start[0])
        elif token.type not in skipped and token.type != tokenize.COMMENT:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(comments), len(code - strings)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
