"""Set the XLA flags of a command that compiles, and cache its compiled programs.

Next: `system/xla_flags.py` and `program_cache.py` beside it.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata

from shardtrain.cli.arguments import find_values
from shardtrain.system import terminal
from shardtrain.system.program_cache import ProgramCounts, find_program_folder, keep_programs
from shardtrain.system.xla_flags import PRESETS, Preset, apply_preset, preset_text

OPTION = "--xla-preset"


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of commands that compile programs.

    Args:
      xla_preset: named set of XLA flags. "auto" sets the flags that were measured to be faster on a CPU.
        "latency-hiding" also sets the flags that let GPUs compute while they communicate. "none" sets no
        flags. Flags of one kind of device are not set if the environment sets XLA flags for that kind.
    """

    xla_preset: Preset = "auto"


def set_xla_flags(arguments: Sequence[str]) -> str:
    """Add the flags of --xla-preset to XLA_FLAGS; return the line of the log, "" without flags.

    Call it before the run file is loaded, which may start jax: XLA reads its flags once, at that time.

    Args:
      arguments: the command line; its parser refuses a preset of an unknown name.
    """
    preset = next(reversed(find_values(arguments, OPTION)), CompileOptions.xla_preset)
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


def has_jax_started() -> bool:
    """Return whether jax has started its devices, after which XLA reads no flags."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@contextmanager
def cache_programs(flags_text: str) -> Iterator[None]:
    """Load and save the programs that are compiled inside, and print lines about it to standard error.

    Args:
      flags_text: the text of `set_xla_flags`, which is printed first.
    """
    # jax starts in `keep_programs`
    for text in filter(None, (flags_text, keep_programs(os.environ))):
        terminal.err(f"{text}\n")
    with ProgramCounts() as programs:
        yield
    if text := programs.text(find_program_folder()):
        terminal.err(f"{text}\n")
