"""Load a run from a file or module of the user, and apply the files that options name to it.

Next: `run_options.py`, which makes options of the run's fields.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from shardtrain.cli.arguments import find_values
from shardtrain.cli.field_options import replace_fields
from shardtrain.combine import Combiner
from shardtrain.combine.synchronisation import preset
from shardtrain.data.mixture import Mixture
from shardtrain.data.tokenizer import BYTES, TOKENIZER_FILE
from shardtrain.errors.messages import near
from shardtrain.errors.user_code import PACKAGE, UserCodeFailed, find_raising_line, user_code
from shardtrain.islands.cluster import Cluster, read_cluster
from shardtrain.sharding.layout_file import read_layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.pretrained import is_pretrained, keep_training_options, read_lora, read_pretrained
from shardtrain.trainer.strategy import Strategy, read_strategy

GIVE = "give a path.py[:name] or module:name"
"""End of a message about a run that cannot be loaded."""


def load_run(source: str) -> Run:
    """Return the run that a file or module defines.

    Args:
      source: `path.py`, `path.py:name`, or `module:name`; without a name, `run`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no such name in it, or not a function that returns a `Run`.
    """
    origin, _, name = source.partition(":")
    if origin.endswith(".py"):
        module = load_file(Path(origin))
    else:
        _make_importable(Path.cwd())
        module = load_module(origin, GIVE)
    make: Callable[[], Run] | None = getattr(module, name or "run", None)
    if make is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{origin} has no {near(name or 'run', names)}; a run file defines def run() -> Run")
    if callable(make) and inspect.signature(make).parameters:
        raise ValueError(f"{source} is a function with arguments; a run file defines def run() -> Run")
    run = _call(make, origin) if callable(make) else make
    if not isinstance(run, Run):
        raise ValueError(f"{source} gave {type(run).__name__} {run!r}; it must return a shardtrain.Run")
    if run.run_dir is None:
        run = dataclasses.replace(run, run_dir=Path("runs") / re.sub(r"\W", "_", Path(origin).stem))
    return run


def load_combiner(text: str) -> str | Combiner:
    """Return the combiner that a file of the user defines; the name of a built-in one is returned unchanged.

    Args:
      text: a name such as `int8+adasum`, or `path.py:name` of a `Combiner` or of a function that returns one.

    Raises:
      FileNotFoundError: no such file.
      ValueError: the file does not define a combiner with this name.

    >>> load_combiner("int8+adasum")
    'int8+adasum'
    """
    path, _, name = text.partition(":")
    if not path.endswith(".py"):
        return text
    module = load_file(Path(path))
    found = getattr(module, name or "combiner", None)
    found = found() if callable(found) and not isinstance(found, Combiner) else found
    if not isinstance(found, Combiner):
        names = [n for n, value in vars(module).items() if not n.startswith("_")]
        raise ValueError(
            f"--combine {text}: {path} has no combiner by the name {near(name or 'combiner', names)};"
            " give it a shardtrain.combine.Combiner, or a function without arguments that returns one"
        )
    return found


def load_file(path: Path) -> Any:
    """Import a Python file under the name of its stem.

    Raises:
      FileNotFoundError: no such file.
    """
    if not path.is_file():
        why = f": it is a link to {path.readlink()}, which leads to no file" if path.is_symlink() else ""
        raise FileNotFoundError(f"there is no run file {path}{why}; {GIVE}")
    _make_importable(path.resolve().parent)
    # under its stem, so that pickled names of the file can be imported again
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with user_code(lambda error: f"{path}, as it was imported,"):
        spec.loader.exec_module(module)
    return module


UNKNOWN = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def _call(make: Callable[[], Any], origin: str) -> Any:
    """Call the function of a run file.

    Raises:
      ValueError: it sets an unknown field of a class of this package.
      UserCodeFailed: it raised something else.
    """
    try:
        with user_code(lambda error: f"the run of {origin}"):
            return make()
    except UserCodeFailed as failure:
        unknown = UNKNOWN.search(str(failure.__cause__))
        names = _fields(unknown[1]) if unknown else []
        if unknown is None or not names:
            raise
        line = find_raising_line(failure.__cause__) if failure.__cause__ else origin
        raise ValueError(f"{line}: {unknown[1]} has no field {near(unknown[2], names)}") from failure


def _fields(name: str) -> list[str]:
    """Return the fields of the dataclass of this package with a name; [] if there is none."""
    for module in [module for key, module in sys.modules.items() if key.partition(".")[0] == PACKAGE]:
        found = vars(module).get(name)
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            return [field.name for field in dataclasses.fields(found) if field.init]
    return []


def load_module(name: str, give: str) -> Any:
    """Import a module that the user names.

    Args:
      name: such as `package.module`.
      give: end of the message if it cannot be imported, which names an alternative.

    Raises:
      ValueError: no such module.
      UserCodeFailed: it raised as it was imported.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is not the name of a module; {give}")
    with user_code(lambda error: f"{name}, as it was imported,"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # an import that fails inside the user's module is another error
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise ValueError(f"there is no module {name!r}; {give}") from None


def _make_importable(folder: Path) -> None:
    """Let a run file import its neighbours, as `python file.py` does."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """Options that replace many fields of the run file, before other options change single fields.

    Args:
      strategy: strategy file, such as the strategy.toml of a run folder.
      synchronisation: preset of how replicas synchronise: every-step, local-sgd, diloco, streaming-diloco,
        adasum-deltas or hierarchical. Other options of this section override it.
      cluster: cluster file, such as meshes/two_kinds_of_islands.toml. It may set other fields of the strategy
        for each kind of islands; sections of the strategy itself take precedence.
    """

    strategy: Path | None = None
    synchronisation: str | None = None
    cluster: Path | None = None


def read_given_strategy(words: Sequence[str]) -> Strategy | None:
    """Read the strategy that `--strategy FILE` names; return None without the option.

    Raises:
      ValueError: it cannot be read.
    """
    given = find_values(words, "--strategy")
    return read_strategy(Path(given[-1])) if given else None


def apply_files(run: Run, words: Sequence[str]) -> Run:
    """Apply the files and presets that the command line names to a run.

    Raises:
      ValueError: one of them cannot be read, or is not known.
    """
    # the model of Hugging Face that the run starts from
    given = find_values(words, "--start-from", "--start-from.checkpoint")
    if given and is_pretrained(Path(given[-1])):
        model = keep_training_options(read_pretrained(given[-1]), run.model)
        if adapter := find_values(words, "--start-from.adapter"):
            model = dataclasses.replace(model, lora=read_lora(adapter[-1], model))
        run = dataclasses.replace(run, model=model)
    # the strategy file, the preset of synchronisation, the sections of the cluster file, the layout file
    if (strategy := read_given_strategy(words)) is not None:
        run = replace_fields(run, {"strategy": strategy})
    if given := find_values(words, "--synchronisation"):
        run = replace_fields(run, {"strategy.synchronisation": preset(given[-1])})
    if (cluster := read_given_cluster(words)) is not None:
        own = run.strategy.islands
        merged = {name: {**each, **own.get(name, {})} for name, each in cluster.strategy_sections.items()}
        # a section of the strategy itself keeps its values, and its place after those of the cluster
        rest = {name: section for name, section in own.items() if name not in merged}
        run = replace_fields(run, {"strategy.islands": {**merged, **rest}})
    given = find_values(words, "--mesh", "--strategy.layout.mesh")
    if given and is_layout_file(given[-1]):
        run = replace_fields(run, {"strategy.layout": read_layout(Path(given[-1]))})
    return run


def adopt_tokenizer(run: Run, changes: Collection[str]) -> Run:
    """Let data that would read bytes use the tokenizer of the Hugging Face model that a run starts from.

    Args:
      run: the run.
      changes: paths of the fields that the command line sets; without start_from, nothing changes.
    """
    folder = run.start_from.checkpoint
    if "start_from.checkpoint" not in changes:
        return run
    if folder is None or not is_pretrained(folder) or not (folder / TOKENIZER_FILE).is_file():
        return run
    return dataclasses.replace(run, data=_replace_tokenizer(run.data, str(folder), "data", changes))


def _replace_tokenizer(data: Any, tokenizer: str, name: str, changes: Collection[str]) -> Any:
    """Set the tokenizer of data, or of the parts of a mixture, that would read bytes.

    Args:
      data: the data of the run.
      tokenizer: the folder of the tokenizer.
      name: path of the data's fields.
      changes: paths of the fields that the command line sets, which are kept.
    """
    if isinstance(data, Mixture):
        parts = {
            part: _replace_tokenizer(each, tokenizer, f"{name}.parts.{part}", changes)
            for part, each in data.parts.items()
        }
        return dataclasses.replace(data, parts=parts)
    if f"{name}.tokenizer" in changes or getattr(data, "tokenizer", None) != BYTES:
        return data
    return data.replace_tokenizer(tokenizer) if hasattr(data, "replace_tokenizer") else data


def read_given_cluster(words: Sequence[str]) -> Cluster | None:
    """Read the cluster that `--cluster FILE` names; return None without the option.

    Raises:
      ValueError: it cannot be read.
    """
    given = find_values(words, "--cluster")
    return read_cluster(Path(given[-1])) if given else None


def is_layout_file(mesh: str) -> bool:
    """Return whether the value of --mesh names a layout file."""
    return mesh.endswith(".toml") or Path(mesh).is_file()
