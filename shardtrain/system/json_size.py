"""Bound the memory of parsed JSON by counting its values before."""

import re

MOST_VALUES = 1 << 23
"""Largest number of values of a JSON text; each takes up to 200 bytes."""

TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{,]', re.DOTALL)


def check_values(text: str) -> None:
    """Check that JSON has at most `MOST_VALUES` values, where an array or object counts as two.

    Raises:
      ValueError: it has more.
    """
    if len(text) <= MOST_VALUES // 2:
        return
    if 2 * (text.count("[") + text.count("{")) + text.count(",") <= MOST_VALUES:
        return
    # brackets and commas inside strings are no values
    count = 0
    for token in TOKENS.finditer(text):
        start = text[token.start()]
        count += 0 if start == '"' else 1 if start == "," else 2
        if count > MOST_VALUES:
            raise ValueError(
                f"it has more than {MOST_VALUES:,} values (an array or object counts as two); split it into"
                " several"
            )
