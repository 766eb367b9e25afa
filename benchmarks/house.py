"""Print how large the last commit is: lines of code by package, words of docs, options of commands.

    python benchmarks/house.py [COMMIT]     # beside another one

Lines of code are those without docstrings, comments and blanks. Needs no jax.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
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


def read_files(commit: str) -> dict[str, str]:
    """Return path -> text of the files of a commit."""
    git = ["git", "-C", str(ROOT), "archive", commit]
    data = subprocess.run(git, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as files:
        return {
            each.name: file.read().decode()
            for each in files
            if each.name.endswith((".py", ".md", "/cli.txt")) and (file := files.extractfile(each))
        }


def measure(files: dict[str, str]) -> dict[str, str]:
    """Return figure -> text: lines of packages, words of pages, options of commands."""
    lines, words = Counter[str](), Counter[str]()
    for path, text in files.items():
        top, *rest = path.split("/")
        if path.endswith(".py") and top in FOLDERS:
            for name in {top, f"{top}/{rest[0]}" if top == "shardtrain" and len(rest) > 1 else top}:
                lines[name] += count_lines(text)
        elif path.endswith(".md") and (top == "docs" or not rest):
            for name in ("pages", f"docs/{rest[0]}" if len(rest) > 1 else top):
                words[name] += len(text.split())
    snapshot = files.get("tests/snapshots/cli.txt", "")
    options = Counter(re.findall(r"^(\w+) examples/gpt_text", snapshot, re.MULTILINE))
    return {
        **{name: f"{lines[name]:,}" for name in sorted(lines)},
        **{f"words of {name}": f"{words[name]:,}" for name in sorted(words)},
        **{f"options of {name}": str(num) for name, num in options.items()},
    }


def main(*commits: str) -> None:
    columns = [measure(read_files(commit)) for commit in commits]
    print(f"{'lines of':30}" + "".join(f"{commit:>16}" for commit in commits))
    for name in dict.fromkeys(name for column in columns for name in column):
        print(f"{name:30}" + "".join(f"{column.get(name, ''):>16}" for column in columns))


if __name__ == "__main__":
    main("HEAD", *sys.argv[1:])
