"""Write to the terminal, with control characters escaped. No jax.

Names of files, arrays and options come from checkpoints and downloads; an escape sequence in them could hide
lines, set the clipboard or the title. Colours come from rich, which gets texts through `printable`.
"""

import sys
import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's control and format characters, halves of surrogate pairs, separators of lines and paragraphs."""


def printable(text: str, kept: str = "\n\t") -> str:
    r"""Escape every control or invisible character of a text.

    Args:
      text: untrusted text.
      kept: control characters to leave as they are.

    >>> printable("a\x1b[2J\nb"), printable("a\nb", kept="")
    ('a\\x1b[2J\nb', 'a\\nb')
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in kept or unicodedata.category(c) not in HIDDEN else _escape(c) for c in text)


def out(text: str) -> None:
    """Write to standard output."""
    sys.stdout.write(printable(text))


def err(text: str) -> None:
    """Write to standard error."""
    sys.stderr.write(printable(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
