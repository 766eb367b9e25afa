"""What the MFU of a run divides: the model flops of a row, by the peak of all devices of the run.

Next: `metric_log.py`, which writes it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax

from shardtrain.functional.activation_rules import noting
from shardtrain.functional.model import Model
from shardtrain.plan.devices import TERA, Device, known_device
from shardtrain.report.quantities import count_text
from shardtrain.trainer.config import Run, model_of


def row_seconds_at_peak(
    run: Run,
    batch: Mapping[str, Any],
    devices: Sequence[tuple[str, int]],
    note: Callable[[str], None],
) -> float:
    """Return the seconds that all devices of a run need at their peak for the model flops of a row.

    Args:
      run: the run.
      batch: name -> array (rows, ...), any rows of a batch.
      devices: kind and number of the devices of each island.
      note: receives what MFU is divided by, or why there is none.

    Returns:
      0 where MFU is not known: for devices without a known peak in bfloat16, batches counted in tokens, and
      models that cannot be traced for a device of no kind.
    """
    numbers: Counter[Device] = Counter()
    peak_flops_per_second = 0.0
    for kind, number in devices:
        device = known_device(kind)
        if device is None or device.matrix_flops_per_second is None or run.batch_unit == "tokens":
            return 0.0
        numbers[device] += number
        peak_flops_per_second += number * device.matrix_flops_per_second
    try:
        flops = row_flops(run, batch)
    except Exception as error:  # of any code of the model; a run does not end for want of a metric
        note(f"no MFU: the flops of the model cannot be counted: {type(error).__name__}: {error}")
        return 0.0
    note(peak_text(numbers, flops))
    return flops / peak_flops_per_second


def row_flops(run: Run, batch: Mapping[str, Any]) -> float:
    """Return the flops of a row, forward and backward, without what `remat` recomputes.

    Args:
      run: the run.
      batch: name -> array (rows, ...), any rows of a batch.
    """
    from shardtrain.plan.subject import Subject  # only runs with MFU import the planner

    # cuDNN's attention is one call, whose flops no trace shows
    config: Any = run.model
    is_fused = getattr(config, "attention", None) == "cudnn"
    config = replace(config, attention="xla") if is_fused else config

    def model(remat: str | None) -> Model:
        strategy = replace(run.strategy, remat=remat or run.strategy.remat)
        return model_of(replace(run, model=config, strategy=strategy))

    shapes = {name: jax.ShapeDtypeStruct((run.batch, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    # silent: the attention of this trace is not that of the step
    with noting(lambda text: None):
        return Subject(model=model, loss=run.loss, optimizer=optax.identity(), batch=shapes).row_flops


def peak_text(devices: Mapping[Device, int], row_flops: float) -> str:
    """Say what MFU is divided by.

    Args:
      devices: device with a peak in bfloat16 -> number.
      row_flops: model flops of a row.

    >>> print(peak_text({known_device("NVIDIA L4"): 2}, 2.5e9).replace(" over ", "\\n"))
    MFU: 2.50G flops a row
    the peak in dense bfloat16 of 2 x NVIDIA L4, 121 teraflops/s each (NVIDIA L4 Tensor Core GPU datasheet)
    """
    kinds = [
        f"{number} x {device.kind}, {(device.matrix_flops_per_second or 0) / TERA:g} teraflops/s each"
        f" ({device.source})"
        for device, number in devices.items()
    ]
    return (
        f"MFU: {count_text(row_flops)} flops a row over the peak in dense bfloat16 of {' and '.join(kinds)}"
    )
