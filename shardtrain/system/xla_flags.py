"""Define presets of XLA flags, and join them with the user's flags.

No jax: flags are read once, when its first backend starts. Next: `cli/train.py`, which sets them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, NamedTuple

Preset = Literal["auto", "latency-hiding", "none"]

CHECKED_JAXLIB = ("0.10", "0.11", "0.12")
"""Versions (major.minor) of jaxlib that know all of these flags: XLA ends a process with an unknown flag."""


class Flag(NamedTuple):
    """A flag of XLA.

    Attributes:
      name: the name without dashes; its second word is the kind of device.
      value: the value as XLA parses it.
      why: its effect.
      source: the document that describes or measures it.
    """

    name: str
    value: str
    why: str
    source: str

    @property
    def device(self) -> str:
        """The kind of device of the flag: cpu, gpu."""
        return self.name.split("_")[1]


_NVIDIA = "NVIDIA, JAX-Toolbox, rosetta/docs/GPU_performance.md, pipelined communication of FSDP"
_JAX = "JAX, GPU performance tips, https://docs.jax.dev/en/latest/gpu_performance_tips.html"
_NO_SLOW_REDUCTIONS = Flag(
    "xla_cpu_experimental_ynn_fusion_type",
    "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
    "matrix products with transposed operands without copies; reductions by XLA's own loops",
    "docs/benchmarks/torch.md",
)
PRESETS: dict[str, tuple[Flag, ...]] = {
    "auto": (_NO_SLOW_REDUCTIONS,),
    "latency-hiding": (
        _NO_SLOW_REDUCTIONS,
        Flag("xla_gpu_enable_latency_hiding_scheduler", "true", "computes while collectives run", _JAX),
        Flag("xla_gpu_enable_pipelined_all_gather", "true", "gathers for the next layer of a scan", _NVIDIA),
        Flag(
            "xla_gpu_enable_pipelined_reduce_scatter",
            "true",
            "the same for reduce-scatters",
            _NVIDIA,
        ),
        Flag(
            "xla_gpu_enable_pipelined_all_reduce",
            "true",
            "the same for all-reduces",
            _NVIDIA,
        ),
        Flag(
            "xla_gpu_enable_while_loop_double_buffering", "true", "no copies between steps of a scan", _NVIDIA
        ),
        Flag("xla_gpu_enable_highest_priority_async_stream", "true", "collectives start at once", _NVIDIA),
    ),
    "none": (),
}
"""Name -> flags. A machine ignores flags for other devices."""


@dataclass(frozen=True, kw_only=True)
class PresetFlags:
    """The flags of a preset on this machine.

    Args:
      xla_flags: the value of XLA_FLAGS, with the flags of the preset before those of the user.
      added: the flags that were added.
      notes: reasons why other flags were not added.
    """

    xla_flags: str
    added: tuple[Flag, ...]
    notes: tuple[str, ...]


def apply_preset(preset: str, environ: Mapping[str, str], jaxlib: str) -> PresetFlags:
    """Add the flags of a preset to XLA_FLAGS.

    Flags for a kind of device are not added if XLA_FLAGS has any for it, or if they were not checked
    with this version of jaxlib.

    Args:
      preset: a name of `PRESETS`.
      environ: the environment variables.
      jaxlib: the version of jaxlib.

    >>> apply_preset("auto", {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "0.10.2").added
    ()
    >>> found = apply_preset("auto", {"XLA_FLAGS": "--xla_dump_to=d"}, "0.10.2")
    >>> found.xla_flags.split()[1], len(found.added)
    ('--xla_dump_to=d', 1)
    """
    given = environ.get("XLA_FLAGS", "")
    flags = PRESETS[preset]
    if given.strip() and not given.lstrip().startswith("-"):
        # the path of a file of flags, which XLA reads only without other flags
        return PresetFlags(xla_flags=given, added=(), notes=("XLA flags are those of the file in XLA_FLAGS",))
    if flags and ".".join(jaxlib.split(".")[:2]) not in CHECKED_JAXLIB:
        checked = ", ".join(f"{each}.x" for each in CHECKED_JAXLIB)
        note = (
            f"XLA flags of the preset {preset!r} are not set: they were checked with jaxlib {checked}, this"
            f" is {jaxlib}. Set the flags that you want in XLA_FLAGS"
        )
        return PresetFlags(xla_flags=given, added=(), notes=(note,))
    names = [word.lstrip("-").partition("=")[0] for word in given.split()]
    own = {name.split("_")[1] for name in names if name.startswith("xla_") and name.count("_") > 1}
    added = tuple(flag for flag in flags if flag.device not in own)
    # no note if the user sets the flags of all devices
    left = sorted({flag.device for flag in flags} & own) if added else ()
    return PresetFlags(
        xla_flags=" ".join([*(f"--{flag.name}={flag.value}" for flag in added), *given.split()]),
        added=added,
        notes=tuple(f"XLA flags for the {device} are those of XLA_FLAGS" for device in left),
    )


def quick_options(platform: str, jaxlib: str | None = None) -> dict[str, bool | int] | None:
    """Return compiler options for a program that runs once, such as the initial state; None for the default.

    On a CPU LLVM would spend most of the time on optimising loops of random numbers. Results are rounded
    differently than by an optimised program.

    Args:
      platform: platform of the devices, "cpu" or another.
      jaxlib: version of jaxlib; None means the installed one.

    >>> quick_options("cpu", "0.10.2")["xla_backend_optimization_level"]
    0
    >>> quick_options("gpu") is None and quick_options("cpu", "0.13.0") is None
    True
    """
    if not _is_checked_cpu(platform, jaxlib):
        return None
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def mesh_options(platform: str, jaxlib: str | None = None) -> dict[str, bool | str] | None:
    """Return compiler options for a program over a mesh; None for the default.

    jaxlib 0.11 and 0.12 name the device groups of a collective by the axes of the mesh. In a pipeline this
    crashes 0.11.2 and 0.12.0 at a lookup of rows that `data` shards in a table that `tensor` shards. With
    these options the groups are lists of devices, as in jaxlib 0.10.

    Args:
      platform: platform of the devices: cpu, gpu, tpu.
      jaxlib: version of jaxlib; None means the installed one.

    >>> mesh_options("cpu", "0.12.0")
    {'xla_enable_rgv3_materialization': False}
    >>> mesh_options("gpu", "0.11.2")
    {'xla_enable_rgv3_materialization': False}
    >>> mesh_options("cpu", "0.10.2") is None and mesh_options("tpu", "0.11.2") is None
    True
    """
    version = metadata.version("jaxlib") if jaxlib is None else jaxlib
    names_axes = version.startswith(("0.11.", "0.12.")) and platform in ("cpu", "gpu", "cuda", "rocm")
    return {"xla_enable_rgv3_materialization": False} if names_axes else None


def step_options(platform: str, jaxlib: str | None = None) -> dict[str, bool | str] | None:
    """Return compiler options for a program with gradients, including `mesh_options`; None for the default.

    XLA for CPUs drops `optimization_barrier` before it fuses loops, so that it ignores which values a model
    computes once (`models/ops/cpus.py`) or recomputes (`jax.checkpoint`). These options keep the
    barriers.

    Args:
      platform: platform of the devices: cpu, gpu, tpu.
      jaxlib: version of jaxlib; None means the installed one.

    >>> step_options("cpu", "0.10.2")
    {'xla_disable_hlo_passes': 'cse_barrier_expander'}
    >>> step_options("gpu", "0.10.2") is None and step_options("cpu", "0.13.0") is None
    True
    """
    options = mesh_options(platform, jaxlib)
    if not _is_checked_cpu(platform, jaxlib):
        return options
    return {**(options or {}), "xla_disable_hlo_passes": "cse_barrier_expander"}


def _is_checked_cpu(platform: str, jaxlib: str | None) -> bool:
    """Return whether the devices are CPUs, and XLA options for them were checked with this jaxlib."""
    version = metadata.version("jaxlib") if jaxlib is None else jaxlib
    return platform == "cpu" and ".".join(version.split(".")[:2]) in CHECKED_JAXLIB


def preset_text(preset: str, found: PresetFlags) -> str:
    """Format the log line of a preset: its flags, and notes; "" without either.

    >>> preset_text("none", apply_preset("none", {}, "0.10.2"))
    ''
    """
    flags = " ".join(f"{flag.name}={flag.value}" for flag in found.added)
    return "; ".join([*([f"XLA flags of the preset {preset}: {flags}"] if flags else []), *found.notes])
