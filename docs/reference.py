"""What `mkdocs build` shows: the repository's pages where they stand, and a reference made of docstrings."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

REFERENCE = {
    "shardtrain": "What `import shardtrain as st` gives.",
    "shardtrain.data": "Sources, their order, and arrays on a mesh.",
    "shardtrain.combine": "How replicas become one; parts for a combiner of your own.",
    "shardtrain.models": "Models, sampling, and the files of Hugging Face.",
    "shardtrain.functional": "From Flax modules to pure functions.",
    "shardtrain.pipeline": "Options, schedules as tables, and their simulation.",
    "shardtrain.islands": "Options between islands, and how ranks find each other.",
    "shardtrain.sharding": "Axis sizes, rules and files of a `Layout`.",
}
"""Module -> what it is for; its public names stand on a page of their own."""

MODULES = {
    "shardtrain.models": (
        *(
            "decoder",
            "decoder_flops",
            "encoder",
            "encoder_decoder",
            "mlp",
            "resnet",
            "imagenet_resnet",
            "vgg",
            "vit",
            "linen_decoder",
            "transformer_options",
            "lora",
            "experts_options",
            "rotary",
            "layers",
            "attention",
        ),
        *("generate", "sampling", "key_value_cache", "chunked_logits"),
        *("huggingface", "huggingface.files"),
    ),
    "shardtrain.functional": ("model", "nnx_model"),
    "shardtrain.sharding": ("layout", "layout_file", "axis_sizes", "rules"),
    "shardtrain.pipeline": ("options", "schedule", "table", "simulate", "partition"),
    "shardtrain.islands": ("rank_environment", "rank_placement", "binding", "membership"),
}
"""Package without public names of its own -> the modules that a user needs."""

RUN_FILE = "examples/gpt_text.py"
COMMANDS = (
    *(f"train {RUN_FILE} --help-all", "inspect --help", f"plan {RUN_FILE} --help", "advise --help"),
    *("calibrate --help", "launch --help", "launch slurm --help", "launch flux --help"),
    *("leave --help", "doctor --help"),
    *("checkpoint --help", "generate --help", "evaluate --help", "data --help", "data tokenize --help"),
    *("report --help", "replay --help"),
)
HELPS = """
import contextlib, io, json, sys
from shardtrain import cli
texts = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        cli.main(words)
    texts.append(text.getvalue())
print(json.dumps(texts))
"""
"""A program that prints the helps of commands, each from one process."""


def on_files(files: Files, config: Any) -> Files:
    """All pages and what they link to, by their paths in the repository, and the reference."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    paths = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    linked = {target for name in paths if name.endswith(".md") for target in targets(ROOT / name)}
    shown = [name for name in paths if name.endswith(".md") or name in linked]
    site = [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in shown]
    site += [File.generated(config, f"reference/{module}.md", content=page(module)) for module in REFERENCE]
    site.append(File.generated(config, "reference/cli.md", content=command_line()))
    site.append(File.generated(config, "reference/combinations.md", content=combinations()))
    index = "".join(f"- [`{module}`]({module}.md): {what}\n" for module, what in REFERENCE.items())
    site.append(File.generated(config, "reference/index.md", content=f"# Python\n\n{index}"))
    # the page of jobs is the start page; README stands beside it
    for name, folder in (("docs/index.md", "."), ("README.md", "readme")):
        next(file for file in site if file.src_uri == name).dest_uri = Path(folder, "index.html").as_posix()
    # what the plugins bring
    return Files([*site, *(file for file in files if not file.is_documentation_page())])


def combinations() -> str:
    """What kinds of runs do not have, from the table that refuses it."""
    from shardtrain.trainer.combinations import KINDS, REFUSALS

    text = "# Combinations\n\nWhat a kind of run refuses before its first step, with the value given.\n"
    for kind, title in KINDS.items():
        rows = [
            row.text.replace("{value!r}", "...").replace(" {value}", "")
            for row in REFUSALS
            if kind in row.kinds.split()
        ]
        text += f"\n## {title[0].upper()}{title[1:]}\n\n" + "".join(f"- {row}\n" for row in rows)
    return text


def command_line() -> str:
    """The help of every command, as it prints it."""
    commands = [words.split() for words in COMMANDS]
    environ = {**os.environ, "COLUMNS": "90", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
    printed = subprocess.run(
        [sys.executable, "-c", HELPS, json.dumps(commands)],
        cwd=ROOT, capture_output=True, check=True, text=True, env=environ,
    )  # fmt: skip
    text = "# Command line\n\nWhat `--help` prints, with `examples/gpt_text.py` as the run.\n"
    for words, help_text in zip(commands, json.loads(printed.stdout), strict=True):
        name = " ".join(word for word in words if word not in (RUN_FILE, "--help", "--help-all"))
        text += f"\n## {name}\n\n```text\n{help_text.strip()}\n```\n"
    return text


def targets(path: Path) -> list[str]:
    """The files that a page links to, by their paths in the repository."""
    found = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    inside = [(path.parent / target).resolve() for target in found if "://" not in target]
    return [target.relative_to(ROOT).as_posix() for target in inside if target.is_relative_to(ROOT)]


def page(module: str) -> str:
    """The reference of a module: its public names, without those that the page of `shardtrain` has."""
    elsewhere = set() if module == "shardtrain" else set(public("shardtrain").items())
    text = f"# {module}\n\n{REFERENCE[module]}\n"
    for part in [f"{module}.{name}" for name in MODULES[module]] if module in MODULES else [module]:
        text += f"\n## {part}\n" if part != module else ""
        names = sorted(set(public(part).items()) - elsewhere)
        text += "".join(f"\n::: {where}.{name}\n" for name, where in names)
    return text


class Doctests(griffe.Extension):
    """Shows the examples of a docstring as code, wherever they stand."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence each paragraph that is a doctest."""
        if obj.docstring is not None:
            paragraphs = re.split(r"\n\n+", obj.docstring.value)
            fenced = [f"```pycon\n{text}\n```" if text.startswith(">>>") else text for text in paragraphs]
            obj.docstring.value = "\n\n".join(fenced)


def public(module: str) -> dict[str, str]:
    """Public name of a module -> the module that defines it."""
    path = ROOT / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    aliases = [
        (alias, node.module or "")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    # `from a import b as b` makes b public
    if exported := {alias.name: origin for alias, origin in aliases if alias.asname == alias.name}:
        return dict(sorted(exported.items()))
    imported = {alias.asname or alias.name: origin for alias, origin in aliases}
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return {name: imported.get(name, module) for name in ast.literal_eval(node.value)}
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {name: module for name in defined if not name.startswith("_")}
