"""ICC profiles built from primaries and a curve, and conversion of their colours to sRGB by arithmetic."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WHITE_D65 = (0.3127, 0.3290)
SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
"""Red, green and blue primaries of IEC 61966-2-1, as chromaticities (x, y)."""

DISPLAY_P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
"""Primaries of SMPTE EG 432-1. With D65 as white and sRGB's curve, they define Apple's Display P3."""

_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
_D50 = np.array([0.9642, 1.0, 0.8249])


def to_xyz(primaries: tuple[tuple[float, float], ...]) -> Floats:
    """Return the matrix (3, 3) from linear light in these primaries to XYZ, with D65 as white."""

    def xyz(x: float, y: float) -> Floats:
        return np.array([x / y, 1.0, (1 - x - y) / y])

    columns = np.stack([xyz(*each) for each in primaries], axis=1)
    return columns * np.linalg.solve(columns, xyz(*WHITE_D65))


def gamma_curve(gamma: float) -> bytes:
    """Return the ICC curve of a power function; the exponent is rounded to 1/256."""
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"


def srgb_curve() -> bytes:
    """Return the curve of IEC 61966-2-1, as a parametric ICC curve of type 3."""
    numbers = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    return b"para\0\0\0\0" + struct.pack(">HH", 3, 0) + _fixed(numbers)


def matrix_profile(primaries: tuple[tuple[float, float], ...], curve: bytes) -> bytes:
    """Return a display profile with one curve for all channels; ICC.1 requires primaries adapted to D50."""
    white = to_xyz(primaries).sum(axis=1)
    adapt = np.linalg.inv(_BRADFORD) @ np.diag((_BRADFORD @ _D50) / (_BRADFORD @ white)) @ _BRADFORD
    tags = [(b"wtpt", b"XYZ \0\0\0\0" + _fixed(_D50))]
    for name, column in zip((b"rXYZ", b"gXYZ", b"bXYZ"), (adapt @ to_xyz(primaries)).T, strict=True):
        tags.append((name, b"XYZ \0\0\0\0" + _fixed(column)))
    tags += [(name, curve) for name in (b"rTRC", b"gTRC", b"bTRC")]
    return _profile(b"RGB ", tags)


def grey_profile(curve: bytes) -> bytes:
    """Return a display profile of a single channel, as scanners write it."""
    return _profile(b"GRAY", [(b"wtpt", b"XYZ \0\0\0\0" + _fixed(_D50)), (b"kTRC", curve)])


def cmyk_profile(lightness: npt.NDArray[np.uint8]) -> bytes:
    """Return a profile whose colours are greys: CIE L* (2, 2, 2, 2), 255 for white, by full and missing inks.

    The table is an ICC `lut8Type`; colours between full and missing ink are interpolated.
    """
    neutral = np.stack([lightness, np.full_like(lightness, 128), np.full_like(lightness, 128)], axis=-1)
    identity = bytes(range(256))
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + _fixed(np.eye(3).ravel())
    table += identity * 4 + neutral.tobytes() + identity * 3
    return _profile(b"CMYK", [(b"wtpt", b"XYZ \0\0\0\0" + _fixed(_D50)), (b"A2B0", table)], b"Lab ")


def _profile(colour_space: bytes, tags: list[tuple[bytes, bytes]], connected_to: bytes = b"XYZ ") -> bytes:
    body, table, offset = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags:
        table += name + struct.pack(">II", offset + len(body), len(data))
        body += data
    size = offset + len(body)
    head = struct.pack(">I", size) + b"\0" * 4 + struct.pack(">I", 0x02100000)
    head += b"mntr" + colour_space + connected_to + b"\0" * 12 + b"acsp" + b"\0" * 28 + _fixed(_D50)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def srgb_encoded(light: Floats) -> Floats:
    """Encode linear light in [0, 1] as sRGB levels in [0, 1], by IEC 61966-2-1."""
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


def srgb_of_p3(levels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Convert Display P3 levels (H, W, 3) to sRGB levels, clipped to sRGB's gamut and rounded to nearest."""
    shares = levels / 255.0
    light = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    linear = light @ (np.linalg.inv(to_xyz(SRGB)) @ to_xyz(DISPLAY_P3)).T
    return np.floor(srgb_encoded(linear.clip(0, 1)) * 255 + 0.5).astype(np.uint8)


def _fixed(values: npt.ArrayLike) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in np.asarray(values).tolist())
