"""The flops of a compiled program: its matrix products and convolutions, each as often as its loops run.

XLA's own `cost_analysis` counts the body of a loop once.
"""

import math
import re

from shardtrain.plan.hlo.dataflow import Frame
from shardtrain.plan.hlo.text import Instruction, parse
from shardtrain.plan.hlo.trip_count import trip_count

_GEMM_DIMS = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def matrix_flops(hlo_text: str) -> float:
    """Return the flops of one device in one call of a compiled program.

    Of a conditional the most expensive branch counts; a loop whose trips the text does not tell counts once.

    Args:
        hlo_text: what `jax.jit(f).lower(...).compile().as_text()` returns.
    """
    module = parse(hlo_text)
    return _flops(Frame(module=module, computation=module.entry))


def _flops(frame: Frame) -> float:
    total = 0.0
    for instruction in frame.computation.instructions.values():
        inner = frame.callee(instruction)
        if instruction.opcode == "dot" or (instruction.opcode == "custom-call" and _is_gemm(instruction)):
            total += _of_dot(frame, instruction)
        elif instruction.opcode == "convolution":
            total += _of_convolution(frame, instruction)
        elif instruction.opcode == "while":
            body = _flops(frame.body(instruction))
            total += body * (trip_count(frame, instruction) or 1) if body else 0.0
        elif instruction.opcode == "conditional":
            total += max(map(_flops, frame.branches(instruction)), default=0.0)
        elif inner is not None:
            total += _flops(inner)
    return total


def _is_gemm(instruction: Instruction) -> bool:
    """Return whether a library call is a matrix product."""
    return _GEMM_DIMS.search(instruction.attributes) is not None


def _of_dot(frame: Frame, instruction: Instruction) -> float:
    listed = instruction.braced("lhs_contracting_dims")
    if listed is None:
        found = _GEMM_DIMS.search(instruction.attributes)
        listed = found[1] if found else ""
    left = frame.computation.instructions[instruction.operands[0]].arrays[0].sizes
    summed = math.prod(left[int(dim)] for dim in re.findall(r"\d+", listed))
    return 2.0 * instruction.arrays[0].num_elements * summed


def _of_convolution(frame: Frame, instruction: Instruction) -> float:
    kernel = frame.computation.instructions[instruction.operands[1]].arrays[0]
    # as in dim_labels=b01f_01io->b01f, where o are the output features
    labels = re.search(r"dim_labels=\w+?_(\w+)->", instruction.attributes)
    features = kernel.sizes[labels[1].index("o")] if labels else 1
    return 2.0 * instruction.arrays[0].num_elements * kernel.num_elements / features
