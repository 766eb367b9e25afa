"""Whether a compiled program can wait for ever: all devices meet at a collective-permute, whoever sends.

Other collectives meet in groups. In a branch that only some devices take, as the stages of a pipeline do, a
permute therefore never ends, while a reduction among devices that take the same branch does.
"""

from collections.abc import Iterator

from shardtrain.plan.hlo.collectives import KINDS, PERMUTE
from shardtrain.plan.hlo.dataflow import Frame
from shardtrain.plan.hlo.text import Instruction, parse


def permutes_in_branches(hlo_text: str) -> list[str]:
    """The collective-permutes that a branch of a conditional contains.

    Args:
      hlo_text: what `jax.jit(f).lower(...).compile().as_text()` returns.

    Returns:
      For each its name, with the traced operation it came from; empty where none can be left waiting.

    Raises:
      ValueError: the text is not HLO.
    """
    module = parse(hlo_text)
    return list(_found(Frame(module=module, computation=module.entry), in_branch=False))


def _found(frame: Frame, in_branch: bool) -> Iterator[str]:
    for instruction in frame.computation.instructions.values():
        if in_branch and instruction.opcode.removesuffix("-start") == PERMUTE:
            yield f"{instruction.name} ({instruction.source or 'no source noted'})"
        for inner in _inner(frame, instruction):
            yield from _found(inner, in_branch or instruction.opcode == "conditional")


def _inner(frame: Frame, instruction: Instruction) -> tuple[Frame, ...]:
    """What an instruction runs: the parts of a loop, the branches of a conditional, what it calls."""
    if instruction.opcode == "while":
        return frame.body(instruction), frame.condition(instruction)
    if instruction.opcode == "conditional":
        return frame.branches(instruction)
    called = frame.callee(instruction)
    return () if called is None else (called,)


def unordered(hlo_text: str) -> list[tuple[str, str]]:
    """Pairs of operations that move data between devices, where the second waits for nothing of the first.

    XLA's runtime for CPUs begins with collectives in the order of the program. But a loop or conditional has
    begun before the collectives in it have: a device may then come to the second operation before these,
    another device after, and both wait, for ever once no thread is free.

    Args:
      hlo_text: what `jax.jit(f).lower(...).compile().as_text()` returns.

    Returns:
      (name, name) of each pair, of which the first is a loop or conditional; empty where all are in order.

    Raises:
      ValueError: the text is not HLO.
    """
    module = parse(hlo_text)
    return list(dict.fromkeys(_unordered(Frame(module=module, computation=module.entry))))


def _unordered(frame: Frame) -> Iterator[tuple[str, str]]:
    instructions = frame.computation.instructions
    needed: dict[str, set[str]] = {}
    begun: list[str] = []
    for name, instruction in instructions.items():
        operands = [operand for operand in instruction.operands if operand in instructions]
        needed[name] = {*operands}.union(*(needed[operand] for operand in operands))
        inner = _inner(frame, instruction)
        for child in inner:
            yield from _unordered(child)
        holds = any(map(_meets, inner))
        if holds or instruction.opcode.removesuffix("-start") in KINDS:
            yield from ((earlier, name) for earlier in begun if earlier not in needed[name])
        if holds:
            begun.append(name)


def _meets(frame: Frame) -> bool:
    """Whether anything in a frame moves data between devices."""
    return any(
        instruction.opcode.removesuffix("-start") in KINDS or any(map(_meets, _inner(frame, instruction)))
        for instruction in frame.computation.instructions.values()
    )
