"""Find collectives of a compiled program whose order is not fixed."""

from collections.abc import Iterator

from shardtrain.plan.hlo.collectives import KINDS
from shardtrain.plan.hlo.dataflow import Frame
from shardtrain.plan.hlo.rendezvous import list_inner
from shardtrain.plan.hlo.text import parse


def find_unordered(hlo_text: str) -> list[tuple[str, str]]:
    """Return pairs of communicating operations of which the second does not depend on the first.

    XLA's runtime for CPUs starts collectives in program order. But a loop or conditional starts before the
    collectives inside it do, so one device may reach the second operation before them and another device
    after them: both wait, forever once no thread is free.

    Args:
      hlo_text: what `jax.jit(f).lower(...).compile().as_text()` returns.

    Returns:
      (name, name) of each pair, the first being a loop or conditional; empty if all are ordered.

    Raises:
      ValueError: the text is not HLO.
    """
    module = parse(hlo_text)
    return list(dict.fromkeys(_find_unordered(Frame(module=module, computation=module.entry))))


def _find_unordered(frame: Frame) -> Iterator[tuple[str, str]]:
    instructions = frame.computation.instructions
    # name -> all names that its value depends on
    needed: dict[str, set[str]] = {}
    started: list[str] = []
    for name, instruction in instructions.items():
        # instructions are listed after their operands, so their dependencies are known already
        operands = [operand for operand in instruction.operands if operand in instructions]
        needed[name] = {*operands}.union(*(needed[operand] for operand in operands))
        inner = list_inner(frame, instruction)
        for child in inner:
            yield from _find_unordered(child)
        # a loop or conditional with collectives inside must be a dependency of every collective after it
        communicates = any(map(_communicates, inner))
        if communicates or instruction.opcode.removesuffix("-start") in KINDS:
            yield from ((earlier, name) for earlier in started if earlier not in needed[name])
        if communicates:
            started.append(name)


def _communicates(frame: Frame) -> bool:
    """Return whether any instruction of a frame is a collective."""
    return any(
        instruction.opcode.removesuffix("-start") in KINDS
        or any(map(_communicates, list_inner(frame, instruction)))
        for instruction in frame.computation.instructions.values()
    )
