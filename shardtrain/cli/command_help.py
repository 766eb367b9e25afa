"""The text of --help of a command that has commands of its own."""

from collections.abc import Mapping


def usage_text(program: str, what: str, kinds: Mapping[str, type]) -> str:
    """Return the usage of a program: each of its commands with the first line of its options' docstring.

    Args:
      program: its words, such as "shardtrain data".
      what: what its next word is, such as "COMMAND".
      kinds: name -> class of options.

    >>> class Ls:
    ...     "List the files."
    >>> print(usage_text("shardtrain data", "COMMAND", {"ls": Ls}))
    usage: shardtrain data COMMAND ...
    <BLANKLINE>
      ls List the files.
    <BLANKLINE>
    shardtrain data COMMAND --help shows its options.
    <BLANKLINE>
    """
    width = max(map(len, kinds))
    lines = [f"  {name:{width}} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in kinds.items()]
    shown = "\n".join(lines)
    return f"usage: {program} {what} ...\n\n{shown}\n\n{program} {what} --help shows its options.\n"
