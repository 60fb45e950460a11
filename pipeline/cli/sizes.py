"""Bytes and seconds as a person reads them."""

from __future__ import annotations


def bytes_text(number: int) -> str:
    """Such as "712 bytes", "1.4 MB"; powers of 1000."""
    if number < 1000:
        return f"{number} bytes"
    value = float(number)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value / 1000:,.3g} TB"


def seconds_text(seconds: float) -> str:
    """Such as "0.4 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
