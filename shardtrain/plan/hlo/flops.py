"""Count the flops of the matrix products and convolutions of a compiled program, in all trips of its loops.

XLA's own `cost_analysis` counts the body of a loop once.
"""

import math
import re

import numpy as np

from shardtrain.plan.hlo.dataflow import Frame, find_trip_count
from shardtrain.plan.hlo.text import Instruction, parse

_GEMM_DIMS = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')

_CUDNN = re.compile(r'"__cudnn\$conv(\w+)"')

_ARRAYS = {"BackwardInput": (2, 1, 0), "BackwardFilter": (0, 2, 1)}
"""Derivatives by cuDNN have the labels of the convolution that they are of: which of two operands and the
result are its input, kernel and output."""


def matrix_flops(hlo_text: str) -> float:
    """Return the flops of one device in one call of a compiled program.

    The most expensive branch of a conditional counts. A loop with an unknown number of trips counts once.

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
            total += _count_dot(frame, instruction)
        elif instruction.opcode == "convolution" or _CUDNN.search(instruction.attributes):
            total += _count_convolution(frame, instruction)
        elif instruction.opcode == "while":
            body = _flops(frame.body(instruction))
            total += body * (find_trip_count(frame, instruction) or 1) if body else 0.0
        elif instruction.opcode == "conditional":
            total += max(map(_flops, frame.branches(instruction)), default=0.0)
        elif inner is not None:
            total += _flops(inner)
    return total


def _is_gemm(instruction: Instruction) -> bool:
    """Return whether a library call is a matrix product."""
    return _GEMM_DIMS.search(instruction.attributes) is not None


def _count_dot(frame: Frame, instruction: Instruction) -> float:
    listed = instruction.find_braced("lhs_contracting_dims")
    if listed is None:
        found = _GEMM_DIMS.search(instruction.attributes)
        listed = found[1] if found else ""
    left = frame.computation.instructions[instruction.operands[0]].arrays[0].sizes
    summed = math.prod(left[int(dim)] for dim in re.findall(r"\d+", listed))
    return 2.0 * instruction.arrays[0].num_elements * summed


def _count_convolution(frame: Frame, instruction: Instruction) -> float:
    """Count the products of real elements, without padding and the zeros between dilated elements.

    The compiler of TPUs writes batched matrix products as convolutions that are mostly padding.
    """
    sizes = [frame.computation.instructions[name].arrays[0].sizes for name in instruction.operands[:2]]
    sizes.append(instruction.arrays[0].sizes)
    library = _CUDNN.search(instruction.attributes)
    order = _ARRAYS.get(library[1], (0, 1, 2)) if library else (0, 1, 2)
    # as in dim_labels=b01f_01io->b01f: batch, features, and numbers for the dims of the window
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None
    arrays = zip(labels.groups(), (sizes[i] for i in order), strict=True)
    left, kernel, out = (dict(zip(names, each, strict=True)) for names, each in arrays)
    window = dict(re.findall(r"(\w+)=(\S+)", instruction.find_braced("window") or ""))
    total = 2.0 * out["b"] * out["f"] * kernel["i"]
    for dim in filter(str.isdigit, out):
        along = {key: values.split("x")[int(dim)] for key, values in window.items()}
        total *= _num_products(left[dim], kernel[dim], out[dim], along)
    return total


def _num_products(left: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Count the pairs of an output and a kernel element along one dim whose input element is real."""
    stride, spread, kernel_spread = (
        int(window.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate")
    )
    before = int(window.get("pad", "0_0").split("_")[0])
    at = stride * np.arange(out)[:, None] + kernel_spread * np.arange(kernel) - before
    return int(((at >= 0) & (at <= spread * (left - 1)) & (at % spread == 0)).sum())
