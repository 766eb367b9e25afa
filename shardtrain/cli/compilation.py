"""What all commands that compile have in common: flags of XLA, and compiled programs that are kept.

Next: `system/xla_flags.py`, `trainer/program_cache.py`.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise

from shardtrain.system import terminal
from shardtrain.system.xla_flags import PRESETS, Preset, apply_preset, preset_text

OPTION = "--xla-preset"


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of commands that compile programs.

    Args:
      xla_preset: flags of XLA by name. "auto": those that were measured to be faster on a CPU.
        "latency-hiding": also those by which GPUs compute while they communicate. "none": no flags. A
        device that the environment has flags of XLA for gets no others.
    """

    xla_preset: Preset = "auto"


def set_xla_flags(arguments: Sequence[str]) -> str:
    """Add the flags of --xla-preset to XLA_FLAGS; return the line of the log, "" without flags.

    It is called before the run file is loaded, which may start jax: flags are read then, once.

    Args:
      arguments: the command line; a preset of an unknown name is left to its parser.
    """
    preset = _find_preset(arguments)
    if preset not in PRESETS:
        return ""
    found = apply_preset(preset, os.environ, metadata.version("jaxlib"))
    if found.added and has_jax_started():
        return (
            f"WARNING: the XLA flags of the preset {preset} are not set, as jax has started before them; give"
            f" them in XLA_FLAGS, or {OPTION} none"
        )
    if found.added:
        os.environ["XLA_FLAGS"] = found.xla_flags
    return preset_text(preset, found)


def _find_preset(arguments: Sequence[str]) -> str:
    """Return the value of --xla-preset, of several the last.

    >>> [_find_preset(words.split()) for words in ("run.py", "run.py --xla_preset=none", "--xla-preset none")]
    ['auto', 'none', 'none']
    """
    found = CompileOptions.xla_preset
    for word, after in pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == OPTION:
            found = value if equals else after
    return found


def has_jax_started() -> bool:
    """Return whether jax has started its devices, after which XLA reads no flags."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@contextmanager
def compiling(flags_text: str, say: Callable[[str], None] = terminal.err) -> Iterator[None]:
    """Keep the programs that are compiled inside for the next start, and load those that are kept.

    Args:
      flags_text: from `set_xla_flags`; printed first.
      say: prints a line; by default to standard error, as results are on standard output.
    """
    from shardtrain.trainer.program_cache import (
        ProgramCounts,
        find_program_folder,
        keep_programs,
    )  # jax starts here

    for text in filter(None, (flags_text, keep_programs(os.environ))):
        say(f"{text}\n")
    with ProgramCounts() as programs:
        yield
    if text := programs.text(find_program_folder()):
        say(f"{text}\n")
