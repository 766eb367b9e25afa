"""Functions and methods by which the package's source reads, writes and deletes files."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

FUNCTIONS = {
    *("json.load", "json.loads", "json.JSONDecoder", "tomllib.load", "tomllib.loads"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("tarfile.open", "tarfile.TarFile", "zipfile.ZipFile", "gzip.open", "gzip.GzipFile"),
    *("bz2.open", "bz2.BZ2File", "lzma.open", "lzma.LZMAFile", "csv.reader", "csv.DictReader"),
    *("mmap.mmap", "numpy.memmap", "numpy.lib.format.open_memmap", "numpy.load", "numpy.fromfile"),
    *("numpy.loadtxt", "numpy.genfromtxt", "numpy.save", "numpy.savez", "numpy.savetxt"),
    *("io.open", "io.FileIO", "os.open", "os.fdopen", "os.replace", "os.rename", "os.remove", "os.unlink"),
    *("os.rmdir", "os.removedirs", "os.truncate", "os.symlink", "os.link"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move", "shutil.rmtree"),
}
METHODS = {
    *("read_text", "read_bytes", "memory_map", "ParquetFile", "read_table", "OSFile"),
    *("write_text", "write_bytes", "savefig", "tofile"),
    *("unlink", "rmdir", "rename", "touch", "symlink_to", "hardlink_to"),
}


def file_accesses(source: str) -> Iterator[str]:
    """Yield `json.loads`, `.read_text`, `.open(w)`, ... for each use in a source, also without a call.

    Names of imports are followed. `.open(?)` is a call whose mode is not written there, or of no path.
    """
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                top = each.name.partition(".")[0]
                known[each.asname or top] = each.name if each.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (found := _opened(node, known)):
            yield found
        if isinstance(node, ast.Attribute | ast.Name):
            first, *rest = _words(node)
            name = ".".join([known.get(first, first), *rest])
            if name in FUNCTIONS:
                yield name
            elif isinstance(node, ast.Attribute) and node.attr in METHODS and first not in known:
                yield f".{node.attr}"


def _words(node: ast.AST) -> list[str]:
    """Return the words of a name with dots; the first is "" of an attribute of another expression."""
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(words)]


def _opened(call: ast.Call, known: dict[str, str]) -> str:
    """Return `open(MODE)`, or `.open(MODE)` of a method; "" for other calls."""
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
    words = _words(call.func)
    if not (is_method or words == ["open"]) or words[0] in known:
        return ""
    at = 0 if is_method else 1
    given = [*call.args[at : at + 1], *(each.value for each in call.keywords if each.arg == "mode")]
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else "?" if given else "r"
    return f"{'.' * is_method}open({mode if isinstance(mode, str) else '?'})"


def package_files() -> Iterator[tuple[str, str]]:
    """Yield (path from the repository's root, source) of each file of the package."""
    for folder in ("shardtrain", "models", "meshes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.resolve().relative_to(ROOT).as_posix(), path.read_text()
