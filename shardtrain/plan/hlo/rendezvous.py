"""Find collectives of a compiled program that not all of their devices reach, which deadlock.

All devices take part in a collective-permute; other collectives are within groups. A permute in a branch that
only some devices take, as pipeline stages do, never ends, while a reduction among these devices does.
"""

from collections.abc import Iterator

from shardtrain.plan.hlo.collectives import PERMUTE
from shardtrain.plan.hlo.dataflow import Frame
from shardtrain.plan.hlo.text import Instruction, parse


def permutes_in_branches(hlo_text: str) -> list[str]:
    """Return the collective-permutes inside branches of conditionals.

    Args:
      hlo_text: what `jax.jit(f).lower(...).compile().as_text()` returns.

    Returns:
      Name and traced operation of each; empty if there are none.

    Raises:
      ValueError: the text is not HLO.
    """
    module = parse(hlo_text)
    return list(_find_permutes(Frame(module=module, computation=module.entry), in_branch=False))


def _find_permutes(frame: Frame, in_branch: bool) -> Iterator[str]:
    for instruction in frame.computation.instructions.values():
        if in_branch and instruction.opcode.removesuffix("-start") == PERMUTE:
            yield f"{instruction.name} ({instruction.source or 'no source noted'})"
        for inner in list_inner(frame, instruction):
            yield from _find_permutes(inner, in_branch or instruction.opcode == "conditional")


def list_inner(frame: Frame, instruction: Instruction) -> tuple[Frame, ...]:
    """Return the frames that an instruction runs: body and condition, branches, or callee."""
    if instruction.opcode == "while":
        return frame.body(instruction), frame.condition(instruction)
    if instruction.opcode == "conditional":
        return frame.branches(instruction)
    called = frame.callee(instruction)
    return () if called is None else (called,)
