"""Print how large this checkout is: lines of code and files by package, words of docs, options of commands.

    python benchmarks/house.py [COMMIT]     # beside a commit, read from git

Lines of code are those without docstrings, comments and blanks. Needs no jax.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLANK = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
FOLDERS = ("shardtrain", "models", "examples", "benchmarks", "tests")


def count_lines(text: str) -> int:
    """Count lines of code.

    >>> count_lines('def f():\\n    \"\"\"Doc.\"\"\"\\n\\n    return 1  # one\\n')
    2
    """
    strings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        owns = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        first = node.body[0] if owns and node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            strings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        n for t in tokens if tokenize.tok_name[t.type] not in BLANK for n in range(t.start[0], t.end[0] + 1)
    }
    return len(code - strings)


def read_files(commit: str | None) -> dict[str, str]:
    """Return path -> text of the files of this checkout, or of a commit."""
    git = ["git", "-C", str(ROOT)]
    listing = ["ls-tree", "-r", "--name-only", commit] if commit else ["ls-files"]
    names = subprocess.run([*git, *listing], check=True, capture_output=True, text=True).stdout.split("\n")
    names = [name for name in names if name.endswith((".py", ".md")) or name == "tests/snapshots/cli.txt"]
    if commit is None:
        return {name: (ROOT / name).read_text() for name in names if (ROOT / name).is_file()}
    asked = "".join(f"{commit}:{name}\n" for name in names).encode()
    data = subprocess.run([*git, "cat-file", "--batch"], input=asked, check=True, capture_output=True).stdout
    found = {}
    for name in names:
        header, _, data = data.partition(b"\n")
        size = int(header.split()[2])
        found[name], data = data[:size].decode(), data[size + 1 :]
    return found


def measure(files: dict[str, str]) -> dict[str, str]:
    """Return figure -> text: lines and files of packages, words of pages, options of commands."""
    lines, num_files, words = Counter[str](), Counter[str](), Counter[str]()
    for path, text in files.items():
        top, *rest = path.split("/")
        if path.endswith(".py") and top in FOLDERS:
            for name in {top, f"{top}/{rest[0]}" if top == "shardtrain" and len(rest) > 1 else top}:
                lines[name] += count_lines(text)
                num_files[name] += 1
        elif path.endswith(".md") and (top == "docs" or not rest):
            for name in ("pages", f"docs/{rest[0]}" if len(rest) > 1 else top):
                words[name] += len(text.split())
    snapshot = files.get("tests/snapshots/cli.txt", "")
    options = Counter(re.findall(r"^(\w+) examples/gpt_text", snapshot, re.MULTILINE))
    return {
        **{name: f"{lines[name]:,} in {num_files[name]}" for name in sorted(lines)},
        **{f"words of {name}": f"{words[name]:,}" for name in sorted(words)},
        **{f"options of {name}": str(num) for name, num in options.items()},
    }


def main(commit: str | None) -> None:
    columns = [measure(read_files(None)), *([measure(read_files(commit))] if commit else [])]
    print(f"{'lines in files':30}{'here':>16}{commit or '':>16}")
    for name in dict.fromkeys(name for column in columns for name in column):
        print(f"{name:30}" + "".join(f"{column.get(name, ''):>16}" for column in columns))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
