"""Detect all-reduces that are reduce-scatters: each device keeps only its own slice of the result.

XLA for CPU has no reduce-scatter, and XLA for TPU too writes it as an all-reduce followed by slices.
"""

import numpy as np

from shardtrain.plan.hlo.dataflow import COPIES, Frame, values
from shardtrain.plan.hlo.replica_groups import Groups
from shardtrain.plan.hlo.text import Array, Instruction

_PASS_ON = COPIES | {"all-reduce-done", "convert", "transpose"}


def is_scattered(frame: Frame, all_reduce: Instruction, part: int, array: Array, groups: Groups) -> bool:
    """Return whether each device uses only its own 1/n of one operand of an all-reduce.

    Args:
        frame: where the all-reduce is.
        all_reduce: the instruction, which may combine several arrays.
        part: index of the operand.
        array: dtype and sizes of that operand.
        groups: groups of n devices that reduce together.

    Returns:
        True if every use, through copies, fusions and calls, is a slice of 1/n with a different start on each
        device of a group; False also if the text does not determine it.
    """
    element = part if len(all_reduce.operands) > 1 else None
    return _only_sliced(frame, all_reduce.name, element, array, groups)


def _only_sliced(frame: Frame, name: str, element: int | None, array: Array, groups: Groups) -> bool:
    """Return whether all uses of a value are such slices; `element` is None unless the value is a tuple."""
    # every use must be such a slice, and the value may not leave the computation otherwise
    uses = [
        _slices(frame, user, name, element, array, groups)
        for user in frame.computation.users.get(name, ())
        if element is None or user.opcode != "get-tuple-element" or user.index == element
    ]
    if frame.computation.root.name == name:
        uses.append(_only_sliced_outside(frame, element, array, groups))
    return bool(uses) and all(uses)


def _only_sliced_outside(frame: Frame, element: int | None, array: Array, groups: Groups) -> bool:
    """Return the same for the result of a fusion or call; False for results of loops and branches."""
    if frame.parent is None or frame.caller is None or frame.parent.callee(frame.caller) is None:
        return False
    return _only_sliced(frame.parent, frame.caller.name, element, array, groups)


def _slices(
    frame: Frame, user: Instruction, name: str, element: int | None, array: Array, groups: Groups
) -> bool:
    """Return whether one use takes such a slice, directly or after passing the value on."""
    if user.opcode == "get-tuple-element":
        return _only_sliced(frame, user.name, None, array, groups)
    if user.opcode in _PASS_ON:
        return _only_sliced(frame, user.name, element, array, groups)
    if user.opcode == "dynamic-slice":
        return _slices_differ(frame, user, array, groups)
    # a fusion or call: look at the uses of the parameters that it gets the value by
    inner = frame.callee(user)
    if inner is None:
        return False
    parameters = inner.computation.parameters
    return all(
        _only_sliced(inner, parameters[number].name, element, array, groups)
        for number, operand in enumerate(user.operands)
        if operand == name
    )


def _slices_differ(frame: Frame, user: Instruction, array: Array, groups: Groups) -> bool:
    """Return whether the devices of each group take n different slices of 1/n."""
    # the slices of a group must have 1/n each, and start at different places
    if any(user.arrays[0].num_elements * len(group) != array.num_elements for group in groups):
        return False
    starts = values(frame, user.operands[1:])
    if starts is None:
        return False
    start_of = np.stack(starts, axis=1)
    return all(len(np.unique(start_of[list(group)], axis=0)) == len(group) for group in groups)
