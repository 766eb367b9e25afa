"""Format quantities as short text: bytes, counts, durations, losses."""

import math


def bytes_text(num_bytes: float) -> str:
    """Format bytes in units of 1024.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def count_text(value: float) -> str:
    """Format a count or a rate with three digits and an SI letter.

    Examples:
        >>> count_text(12_345), count_text(999.9), count_text(5)
        ('12.3k', '1.00k', '5.00')
    """
    for factor, letter in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        scaled = value / factor
        for decimals in (2, 1, 0):
            if abs(round(scaled, decimals)) < 10 ** (3 - decimals):
                return f"{scaled:.{decimals}f}{letter}"
    return f"{value:.2e}"


def duration_text(seconds: float) -> str:
    """Format a duration in its two largest units.

    Examples:
        >>> duration_text(42), duration_text(80), duration_text(7_500), duration_text(273_600)
        ('42s', '1m20s', '2h05m', '3d04h')
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02d}h"
    if hours:
        return f"{hours}h{minute:02d}m"
    return f"{minutes}m{second:02d}s" if minutes else f"{second}s"


def loss_text(value: float) -> str:
    """Format a loss with four decimals, or with an exponent if it is very small or large.

    Examples:
        >>> loss_text(2.34117), loss_text(0.00001234), loss_text(float("nan"))
        ('2.3412', '1.234e-05', 'nan')
    """
    plain = value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value)
    return f"{value:.4f}" if plain else f"{value:.3e}"


def seconds_text(seconds: float) -> str:
    """Format seconds with three digits.

    >>> seconds_text(0.01234), seconds_text(12.3), seconds_text(0.0)
    ('12.3 ms', '12.3 s', '0 s')
    """
    if not seconds:
        return "0 s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
