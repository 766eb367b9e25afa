"""Load a run, or a combiner, from a file or module of the user.

Next: `run_options.py`, which makes options of the run's fields.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardtrain.combine import Combiner
from shardtrain.errors.messages import near
from shardtrain.errors.user_code import PACKAGE, UserCodeFailed, find_raising_line, user_code
from shardtrain.trainer.config import Run

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
