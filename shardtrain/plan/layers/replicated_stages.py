"""Cut a pipeline whose stages may have several unequal devices each, with slower links between nodes. No jax.

Source: Narayanan et al. 2019, PipeDream (SOSP), section 3.1: dynamic programming over layers and devices,
each stage on a few devices that are replicas of it. Added are memory, unequal devices (Park et al. 2020,
HetPipe) and the costs of our stages (`pipeline/stage_costs.py`); a simulation chooses the number of stages.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from shardtrain.plan.layers.replicated_costs import MOST_ENTRIES, ReplicatedCosts, ReplicatedCut


def find_replicated_cuts(costs: ReplicatedCosts) -> list[ReplicatedCut]:
    """Return, for each number of stages, the cut and devices with the least slowest stage or link.

    The search is exact, by dynamic programming from the last stage over the first block and the first device
    of a stage.

    Args:
      costs: costs of the stages.

    Raises:
      ValueError: there are too many blocks and devices.
    """
    blocks, devices = costs.num_blocks, len(costs.pipeline.devices)
    if blocks**2 * devices**2 > MOST_ENTRIES:
        most = math.isqrt(MOST_ENTRIES) // blocks
        raise ValueError(
            f"{blocks} blocks on {devices} devices have {blocks**2 * devices**2:,} stages; at most"
            f" {MOST_ENTRIES:,} are compared: use {most} devices, or several as one"
        )
    # all arrays are over (first block, first device, end of blocks, end of devices)
    by_devices = np.full((4, 1, devices, 1, devices + 1), np.nan)
    for first, end in combinations(range(devices + 1), 2):
        stage, seconds = costs.pipeline.stage(first, end, costs.rows), costs.pipeline.all_reduce_seconds
        figures = stage.flops_per_second, stage.row_shards, stage.memory_bytes, seconds(first, end, 1.0)
        by_devices[:, 0, first, 0, end] = figures
    speed, rows, memory, seconds_per_byte = by_devices
    forward, backward, state, saved = (
        _sum_over_blocks(*costs.list_block_costs(name))
        for name in ("forward_flops", "backward_flops", "state_bytes", "saved_bytes")
    )
    gradients = costs.gradient_bytes
    joined = _sum_over_blocks(gradients.blocks, gradients.first, gradients.last) * seconds_per_byte
    others = backward / speed + joined / costs.num_microbatches
    # (first block, first device) -> seconds to receive a microbatch there
    sent = np.array([0.0, *(block.output_bytes for block in costs.model.blocks)])
    received = np.zeros((blocks + 1, devices + 1))
    for first in range(1, devices):
        received[:, first] = sent / costs.pipeline.link(first - 1, first)
    entering = sent[:blocks, None, None, None]
    has_blocks = np.arange(blocks)[:, None, None, None] < np.arange(blocks + 1)[:, None]

    found: list[ReplicatedCut] = []
    # (first block, first device) -> the least slowest stage from there on; nothing is after the last stage
    least = np.full((blocks + 1, devices + 1), math.inf)
    least[blocks, devices] = 0.0
    chosen: list[np.ndarray] = []
    for number in range(1, min(blocks, devices) + 1):
        # the first of these last stages has as many microbatches in flight as there are stages; every
        # backward recomputes its forward, so the last stage has no separate forward
        live = min(number, costs.num_microbatches)
        stages = forward / speed * (1 if number == 1 else 2) + others
        with np.errstate(invalid="ignore"):
            fits = state + (live * entering + saved) / rows <= memory
        stages = np.where(fits & has_blocks & np.isfinite(stages), stages, math.inf)
        later = np.maximum(least, received) if number > 1 else least
        flat = np.maximum(stages, later[None, None]).reshape(blocks, devices, -1)
        chosen.append(flat.argmin(axis=-1))
        least = np.full_like(least, math.inf)
        least[:blocks, :devices] = flat.min(axis=-1)
        if math.isfinite(least[0, 0]):
            found.append(costs.evaluate(*_trace_back(chosen, least.shape)))
    return found


def _sum_over_blocks(values: Sequence[float], first: float, last: float) -> np.ndarray:
    """Return the sums of a cost from each first block to before each end, with the model's ends."""
    number = len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    found = sums[None, :] - sums[:number, None]
    found[0] += first
    found[:, number] += last
    return found[:, None, :, None]


def best_replicated_cut(costs: ReplicatedCosts) -> ReplicatedCut:
    """Return the cut with the shortest simulated step, of the cuts for each number of stages.

    Raises:
      ValueError: no cut fits the memory, or there are too many blocks and devices.
    """
    found = find_replicated_cuts(costs)
    if not found:
        devices = len(costs.pipeline.devices)
        raise ValueError(
            f"no cut of {costs.num_blocks} blocks fits the memory of {devices} devices; use more devices, or"
            " smaller microbatches"
        )
    return min(found, key=lambda cut: cut.step_seconds)


def _trace_back(chosen: Sequence[np.ndarray], shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return blocks and devices of each stage from the choices of the dynamic programming."""
    counts, devices, at = [], [], (0, 0)
    for choices in reversed(chosen):
        end, used = (int(i) for i in np.unravel_index(choices[at], shape))
        counts.append(end - at[0])
        devices.append(used - at[1])
        at = end, used
    return counts, devices
