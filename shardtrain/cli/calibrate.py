"""`shardtrain calibrate [RUN]`: measure this machine's devices, and print lines of a cluster file for a plan.

With a run, the measured rates are then fitted to a few steps of that run.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardtrain import axes
from shardtrain.cli.arguments import parse_words
from shardtrain.cli.checkpoint_path import MODEL, find_checkpoint_path, select_options
from shardtrain.cli.compilation import CompileOptions, cache_programs, set_xla_flags
from shardtrain.cli.run_options import parse_run
from shardtrain.cli.run_rows import find_devices, read_step_phases
from shardtrain.doctor.rates import best, measure
from shardtrain.errors.messages import refuse
from shardtrain.errors.options import rewrite_texts
from shardtrain.islands.cluster import IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.plan.calibration import FittedMachine, choose_spread, fit_rates
from shardtrain.plan.devices import GB, TERA, find_device
from shardtrain.plan.machine import Link, Machine, Rates, make_simulated_machine
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.prediction import Choice
from shardtrain.plan.space import Space, list_allowed_choices, mesh_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.system import terminal
from shardtrain.trainer.config import Run, describe

SMALL = 8
"""Elements of an array that is so small that the time of its kernels is their overhead."""

KERNELS = 64
"""Number of kernels of the program that measures this overhead."""

LATENCY_SECONDS = 1e-5
"""Latency of a message before steps are measured."""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(CompileOptions):
    """Measure one device of this machine: matrix products, memory, and the time of a small kernel.

    With a run (`shardtrain calibrate RUN --probes 6`) also fit these rates, link and latency to its steps.

    Args:
      dtype: dtype of the matrix products, float32 or bfloat16, as in the run.
    """

    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(CalibrateOptions):
    """Measure one device of this machine, and then fit its rates to steps of a run on all devices.

    Args:
      probes: number of layouts to measure, each for a few steps; the layouts that spend their time most
        differently are chosen. 0 measures none.
      past: folders of past runs of the same model and batch on these devices, whose logged step times are
        also fitted.
    """

    probes: int = 6
    past: tuple[Path, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Print a table `device` of a cluster file; return 0."""
    import jax

    flags_text = set_xla_flags(arguments)
    if arguments and not arguments[0].startswith("-"):
        run, options = parse_run("calibrate", arguments, ProbeOptions)
        if options.probes < 0 or options.probes + len(options.past) < 2:
            raise ValueError(
                f"--probes is {options.probes}; use 2 or more, as in --probes 6"
                + (f", in addition to {len(options.past)} of --past" if options.past else "")
            )
        with cache_programs(flags_text):
            machine = _fit_machine(run, options)
    else:
        options = parse_words(CalibrateOptions, list(arguments), prog="shardtrain calibrate")
        with cache_programs(flags_text):
            machine = measure_machine(options.dtype)
    rates, link = machine.rates, machine.device_link
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    kind = jax.local_devices()[0].device_kind
    lines = {
        "teraflops": rates.flops_per_second / TERA,
        "memory_gb_per_second": rates.memory_bytes_per_second / GB,
        "kernel_us": 1e6 * rates.kernel_seconds,
        **({} if memory is None else {"memory_gb": memory / GB}),
        **({} if link == Link() else {"link_gb_per_second": link.bytes_per_second / GB}),
        **({} if link == Link() else {"latency_us": 1e6 * link.latency_seconds}),
    }
    simulated = "simulated = true\n" if machine.simulated else ""
    of_table = "" if find_device(kind) is None else f'name = "{kind}"\n'
    terminal.out(
        f"# {kind}, products in {options.dtype}; put it below [[islands]] of a cluster file\n"
        f"[islands.device]\n{of_table}"
        + "".join(f"{name} = {value:.4g}\n" for name, value in lines.items())
        + simulated
    )
    return 0


def measure_machine(dtype: str) -> Machine:
    """Measure one device of this machine; if devices are simulated, return the share of one of them.

    Raises:
      ValueError: there are no measurements in this dtype.
    """
    import jax

    host, num_devices = measure_host(dtype), jax.local_device_count()
    if jax.local_devices()[0].platform != "cpu" or num_devices == 1:
        return replace(host, device_link=Link())
    return make_simulated_machine(host, num_devices, count_cores())


def measure_host(dtype: str) -> Machine:
    """Measure one device by small programs, while the other devices are idle.

    Its link copies memory: sent bytes are read and written at the rate of memory.

    Raises:
      ValueError: there are no measurements in this dtype.
    """
    import jax

    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype is {dtype}; use float32 or bfloat16")
    device = jax.local_devices()[0]
    found = measure(device)
    rates = Rates(
        flops_per_second=found[dtype],
        memory_bytes_per_second=found["memory"],
        kernel_seconds=measure_kernel_seconds(device),
        copies_stacked=device.platform == "cpu",
    )
    link = Link(bytes_per_second=found["memory"] / 2, latency_seconds=LATENCY_SECONDS)
    return Machine(rates=rates, device_link=link)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fit_machine(run: Run, options: ProbeOptions) -> Machine:
    """Measure steps of a run on all devices, fit the rates of a device to them, and print the steps."""
    import jax

    from shardtrain.trainer.planned import make_subjects, measure_step_seconds

    devices = jax.device_count()
    start = measure_machine(options.dtype)
    if not start.simulated:
        link = Link(bytes_per_second=start.rates.memory_bytes_per_second, latency_seconds=LATENCY_SECONDS)
        start = replace(start, device_link=link)
    with TemporaryDirectory() as folder:
        source = run.data.train(Path(folder))
        name = jax.local_devices()[0].device_kind
        device = None if find_device(name) is None else ClusterDevice(name=name)
        here = IslandKind(kind="here", devices=devices, device=device)
        (subject,) = make_subjects(run, source, [here])
        past, past_seconds = _read_past_steps(run, options.past, name, devices)
        every = list_allowed_choices(subject, devices, Space())[0] if options.probes else []
        if options.probes and not every:
            raise ValueError(f"no layout for {devices} devices was accepted; there is nothing to measure")
        found = predict_choices(subject, start, devices, every)
        positions = choose_spread(found, options.probes) if every else []
        choices = [every[i] for i in positions]
        seconds = [*(measure_step_seconds(run, source, choice) for choice in choices), *past_seconds]
        choices += past

    def predict(machine: Machine) -> list[float]:
        return [each.seconds.total for each in predict_choices(subject, machine, devices, choices)]

    fitted = fit_rates(start, predict, seconds)
    names = [f"{mesh_text(each.layout)} --accumulate {each.accumulate}" for each in choices]
    for i, path in enumerate(options.past):
        names[len(positions) + i] += f" ({path})"
    terminal.out(probes_text(names, seconds, fitted))
    return fitted.machine


def probes_text(names: Sequence[str], seconds: Sequence[float], found: FittedMachine) -> str:
    """Format measured steps and their predictions as comments of a cluster file."""
    rows = zip(names, seconds, found.before, found.after, found.left_out, strict=True)
    return (
        "# measured steps of the run, and predicted over measured time: before the fit, after it, and after a"
        " fit without that step\n"
    ) + "".join(
        f"# {name}: {1e3 * taken:.4g} ms; {before:.2f}, {after:.2f}, {left_out:.2f}\n"
        for name, taken, before, after, left_out in rows
    )


def measure_kernel_seconds(device: Any) -> float:
    """Measure the seconds of a tiny kernel in a program of many."""
    import jax
    import jax.numpy as jnp

    def chain(x: Any) -> Any:
        # a sum over all elements cannot be fused with the next one
        for _ in range(KERNELS):
            x = x + jnp.cumsum(x)
        return x

    x = jax.device_put(jnp.ones(SMALL), device)
    compiled = jax.jit(chain)
    return best(lambda: jax.block_until_ready(compiled(x))) / KERNELS


MESH = "strategy.layout.mesh."

NUMBERS = ("strategy.accumulate", "strategy.pipeline.virtual_stages")

LENGTHS = ("seq", "window")
"""Endings of the names of data options that set the length of a sample."""


def _read_past_steps(
    run: Run, folders: Sequence[Path], kind: str, num_devices: int
) -> tuple[list[Choice], list[float]]:
    """Read the steps of past runs of the same model and batch, on the same number and kind of devices.

    Returns:
      How each step was run; and its time, without input, saves and evaluations.

    Args:
      run: the run to compare with.
      folders: folders of past runs.
      kind: kind of the devices of this machine.
      num_devices: number of these devices.

    Raises:
      ValueError: lists every folder whose step is unknown or different.
    """
    choices, seconds, problems = [], [], []
    for folder in folders:
        try:
            choice, own_seconds = _read_past_step(run, folder, kind, num_devices)
            choices.append(choice)
            seconds.append(own_seconds)
        except (ValueError, OSError) as error:
            problems.append(str(error) if str(folder) in str(error) else f"{folder}: {error}")
    refuse("past runs cannot be compared with this one", problems)
    return choices, seconds


def _read_past_step(run: Run, folder: Path, kind: str, num_devices: int) -> tuple[Choice, float]:
    _, phases = read_step_phases(folder)
    if any(phases.seconds.get(phase) for phase in ("islands", "stages")):
        raise ValueError("it ran on several islands; give runs of one island")
    options = dict(find_checkpoint_path(str(folder)).reader().extra.get("run") or {})
    own_kind, own_devices = find_devices(folder)
    if (own_kind, own_devices) != (kind, num_devices):
        raise ValueError(
            f"it ran on {own_devices} devices of kind {own_kind}, and this machine has {num_devices} of kind"
            f" {kind}; calibrate there, or with as many devices (--cpu-devices)"
        )
    if other := _list_other_options(run, options):
        raise ValueError(f"it is another step: {'; '.join(other)}; give runs of this model and batch")
    return _choice(options, num_devices), phases.seconds["step"]


def _list_other_options(run: Run, options: Mapping[str, Any]) -> list[str]:
    """List the options of batch, sample length, dtype and model that differ from a run's."""
    here: dict[str, Any] = {"batch": run.batch, "strategy.compute_dtype": run.strategy.compute_dtype}
    of_data = describe(run.data, "data")
    here |= {name: value for name, value in of_data.items() if name.endswith(LENGTHS)}
    if is_dataclass(run.model):
        here |= describe(run.model, "model")
        options = rewrite_texts(type(run.model), options, MODEL)
    return [
        f"{name} was {options[name]!r}, and is {value!r}"
        for name, value in here.items()
        if name in options and isinstance(value, int | float | str | None) and options[name] != value
    ]


def _choice(options: Mapping[str, Any], num_devices: int) -> Choice:
    """Return the choice of layout, microbatches and schedule that options describe.

    Raises:
      ValueError: a checkpoint, which others may have written, has a size that is no whole number.
    """
    sizes_of = [name for name in options if name.startswith(MESH) or name in NUMBERS]
    if odd := [f"{name} is {options[name]!r}" for name in sizes_of if type(options[name]) is not int]:
        raise ValueError(f"its checkpoint has no whole numbers: {', '.join(odd)}; give a run of this library")
    mesh = select_options(options, MESH)
    layout = {
        name: options[f"strategy.layout.{name}"]
        for name in ("zero", "sequence_sharded", "collective_matmul", "context_attention", "unnamed")
        if f"strategy.layout.{name}" in options
    }
    sizes = axis_sizes(mesh or {axes.DATA: -1}, num_devices)
    has_stages = sizes[axes.PIPELINE] > 1
    return Choice(
        layout=Layout(
            mesh={axis: size for axis, size in sizes.items() if size > 1} or {axes.DATA: 1}, **layout
        ),
        accumulate=options.get("strategy.accumulate", 1),
        remat=options.get("strategy.remat"),
        schedule=options.get("strategy.pipeline.schedule", "1f1b") if has_stages else "1f1b",
        virtual_stages=options.get("strategy.pipeline.virtual_stages", 1) if has_stages else 1,
    )
