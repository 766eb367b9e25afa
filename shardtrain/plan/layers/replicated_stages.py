"""Cut a pipeline whose stages may have several devices each, of unequal speed, on links of two speeds.

No jax. Source: Narayanan et al. 2019, PipeDream (SOSP), section 3.1: dynamic programming over layers and
devices, each stage on a few devices that are replicas of it. Here with memory, unequal devices (Park et al.
2020, HetPipe) and the costs of our stages (`pipeline/stage_costs.py`); a simulation chooses their number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardtrain.plan.layers.replicated_costs import MOST_ENTRIES, ReplicatedCosts, ReplicatedCut


def find_replicated_cuts(costs: ReplicatedCosts) -> list[ReplicatedCut]:
    """Return, for each number of stages, the cut and devices with the least slowest stage or link.

    Exact, by dynamic programming from the last stage: over the first block and the first device of a stage.

    Args:
      costs: of the stages.

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
    tables = _Tables.of(costs)
    found = []
    # (first block, first device) -> the least slowest stage of what is behind, none behind the last
    least = np.full((blocks + 1, devices + 1), math.inf)
    least[blocks, devices] = 0.0
    chosen: list[np.ndarray] = []
    for number in range(1, min(blocks, devices) + 1):
        # stages up to the last one, the first of which has as many microbatches in flight as stages behind
        stages = tables.stages(is_last=number == 1, live=min(number, costs.num_microbatches))
        behind = np.maximum(least, tables.received) if number > 1 else least
        total = np.maximum(stages, behind[None, None])
        flat = total.reshape(*total.shape[:2], -1)
        chosen.append(flat.argmin(axis=-1))
        least = np.full_like(least, math.inf)
        least[:blocks, :devices] = flat.min(axis=-1)
        if math.isfinite(least[0, 0]):
            found.append(costs.judged(*_trace_back(chosen, (blocks + 1, devices + 1))))
    return found


def best_replicated_cut(costs: ReplicatedCosts) -> ReplicatedCut:
    """Return, of the cuts for each number of stages, the one with the shortest simulated step.

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


def _trace_back(chosen: Sequence[np.ndarray], shape: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return blocks and devices of each stage, from the choices of what is behind each stage."""
    counts, devices, at = [], [], (0, 0)
    for choices in reversed(chosen):
        end, used = (int(i) for i in np.unravel_index(choices[at], shape))
        counts.append(end - at[0])
        devices.append(used - at[1])
        at = end, used
    return counts, devices


@dataclass(frozen=True, kw_only=True)
class _Tables:
    """Costs of all stages, over (first block, first device, end of blocks, end of devices).

    Args:
      forward: seconds of a forward.
      others: seconds of backward and all-reduce, for a microbatch.
      state: bytes of state.
      saved: bytes that the backward of a microbatch reads.
      entering: bytes of a microbatch's input.
      memory: bytes of the smallest device.
      received: (first block, first device) -> seconds to receive a microbatch there.
    """

    forward: np.ndarray
    others: np.ndarray
    state: np.ndarray
    saved: np.ndarray
    entering: np.ndarray
    memory: np.ndarray
    received: np.ndarray

    @classmethod
    def of(cls, costs: ReplicatedCosts) -> "_Tables":
        blocks, devices = costs.num_blocks, len(costs.pipeline.devices)
        model, pipeline = costs.model, costs.pipeline
        shape = (blocks, devices, blocks + 1, devices + 1)

        def of_blocks(name: str) -> np.ndarray:
            values = [getattr(block, name) for block in model.blocks]
            sums = np.concatenate([[0.0], np.cumsum(values)])
            found = sums[None, :] - sums[:blocks, None]
            found[0] += getattr(model.first, name)
            found[:, blocks] += getattr(model.last, name)
            return found[:, None, :, None]

        speed, rows, memory = (np.full((devices, devices + 1), np.nan) for _ in range(3))
        for first in range(devices):
            for end in range(first + 1, devices + 1):
                stage = pipeline.stage(first, end, costs.rows)
                speed[first, end], rows[first, end] = stage.flops_per_second, stage.row_shards
                memory[first, end] = stage.memory_bytes
        joined = np.full(shape, math.inf)
        for begin in range(blocks):
            for end in range(begin + 1, blocks + 1):
                num_bytes = costs.gradients(begin, end)
                for first in range(devices):
                    for last in range(first + 1, devices + 1):
                        seconds = pipeline.all_reduce_seconds(first, last, num_bytes)
                        joined[begin, first, end, last] = seconds / costs.num_microbatches
        sent = [0.0, *(block.output_bytes for block in model.blocks)]
        received = np.zeros((blocks + 1, devices + 1))
        for first in range(1, devices):
            received[:, first] = np.array(sent) / pipeline.link(first - 1, first)
        forward = of_blocks("forward_flops") / speed[None, :, None]
        return cls(
            forward=forward,
            others=of_blocks("backward_flops") / speed[None, :, None] + joined,
            state=np.broadcast_to(of_blocks("state_bytes"), shape),
            saved=of_blocks("saved_bytes") / rows[None, :, None],
            entering=np.array(sent[:blocks])[:, None, None, None] / rows[None, :, None],
            memory=np.broadcast_to(memory[None, :, None], shape),
            received=received,
        )

    def stages(self, *, is_last: bool, live: int) -> np.ndarray:
        """Return the seconds of all stages that fit, for a microbatch; inf: it does not fit, or is none.

        A backward computes its forward again, so the last stage has no forward of its own.
        """
        seconds = self.forward * (1 if is_last else 2) + self.others
        with np.errstate(invalid="ignore"):
            fits = self.state + live * self.entering + self.saved <= self.memory
        return np.where(fits & np.isfinite(seconds), seconds, math.inf)
