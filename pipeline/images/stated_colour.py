"""Colour that a file states without an ICC profile: in chunks of a PNG, or in an `nclx` box of HEIF or AVIF.

It becomes an ICC profile, so that `colour` converts it like an embedded one. Code points are those of ITU-T
H.273. Camera curves of video (BT.709, BT.601 and BT.2020) count as sRGB's, as in browsers, because files with
them are made for the same screens.
"""

from __future__ import annotations

import io
import struct
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.images.avif import boxes, primary_item, properties_by_item
from pipeline.images.formats import ImageError

_D65, _C = (0.3127, 0.3290), (0.310, 0.316)

_SRGB = (*_D65, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06)
"""Chromaticities (x, y) of white, red, green and blue, as in all values below."""

_CHROMATICITIES = {
    1: _SRGB,
    2: _SRGB,  # unspecified
    4: (*_C, 0.67, 0.33, 0.21, 0.71, 0.14, 0.08),
    5: (*_D65, 0.64, 0.33, 0.29, 0.60, 0.15, 0.06),
    6: (*_D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070),
    7: (*_D65, 0.630, 0.340, 0.310, 0.595, 0.155, 0.070),
    8: (*_C, 0.681, 0.319, 0.243, 0.692, 0.145, 0.049),
    9: (*_D65, 0.708, 0.292, 0.170, 0.797, 0.131, 0.046),
    11: (0.314, 0.351, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    12: (*_D65, 0.680, 0.320, 0.265, 0.690, 0.150, 0.060),
    22: (*_D65, 0.630, 0.340, 0.295, 0.605, 0.155, 0.077),
}
"""Chromaticities by the code point of colour primaries."""

_SRGB_CURVE = None

_GAMMAS: dict[int, float | None] = {
    **dict.fromkeys((1, 2, 6, 11, 12, 13, 14, 15), _SRGB_CURVE),
    4: 2.2,
    5: 2.8,
    8: 1.0,
}
"""Exponent from levels to light, or `_SRGB_CURVE`, by the code point of transfer characteristics."""

_HDR = {16: "PQ (SMPTE ST 2084)", 18: "HLG (ARIB STD-B67)"}
"""Transfer characteristics of HDR."""

_MAX_META_BYTES = 16_000_000
"""Size up to which the metadata of an AVIF are read."""


def stated_profile(image: Image.Image, file: BinaryIO) -> bytes | None:
    """Return an ICC profile for the colour that an opened image states without a profile; None without any.

    The position in the file does not change.

    Raises:
        ImageError: The colour is HDR (`hdr_colour`), or it cannot be converted (`colour_unknown`).
    """
    if image.format == "PNG":
        return _of_png(image, file)
    if image.info.get("icc_profile"):  # takes precedence over nclx, by ISO/IEC 23000-22
        return None
    if image.format == "HEIF" and (nclx := image.info.get("nclx_profile")):
        return _of_code_points(nclx["color_primaries"], nclx["transfer_characteristics"])
    if image.format == "AVIF" and (code_points := _nclx_of_avif(file)) is not None:
        return _of_code_points(*code_points)
    return None


def _of_png(image: Image.Image, file: BinaryIO) -> bytes | None:
    # The order of precedence of the PNG specification: cICP, iCCP, sRGB, then gAMA and cHRM.
    cicp = _cicp_of_png(file)
    if cicp is not None:
        primaries, transfer, matrix, is_full_range = cicp
        if matrix or not is_full_range:
            raise _unknown(
                f"its chunk cICP states matrix {matrix} and range {is_full_range}, which no RGB has"
            )
        return _of_code_points(primaries, transfer)
    if image.info.get("icc_profile") or "srgb" in image.info:
        return None

    # Values that no screen can have are ignored, as libpng does.
    gamma: float = image.info.get("gamma") or 0.0
    chromaticities = image.info.get("chromaticity", _SRGB)
    chromaticities = chromaticities if _to_xyz(chromaticities) is not None else _SRGB
    exponent = 1 / gamma if 0.01 < gamma < 100 else _SRGB_CURVE

    # Writers of sRGB images round the exponent of 2.2, which stands for sRGB's curve.
    is_srgb_curve = exponent is None or abs(exponent / 2.2 - 1) < 0.05
    if is_srgb_curve and chromaticities == _SRGB:
        return None
    return _profile(chromaticities, _SRGB_CURVE if is_srgb_curve else exponent)


def _of_code_points(primaries: int, transfer: int) -> bytes:
    if transfer in _HDR:
        detail = f"it stores HDR colour with the transfer function {_HDR[transfer]}"
        raise ImageError("hdr_colour", detail, fix="export it as SDR, such as sRGB, or remove it")
    if primaries not in _CHROMATICITIES or transfer not in _GAMMAS:
        raise _unknown(f"it states colour primaries {primaries} and transfer {transfer} of ITU-T H.273")
    return _profile(_CHROMATICITIES[primaries], _GAMMAS[transfer])


def _unknown(detail: str) -> ImageError:
    return ImageError("colour_unknown", detail, fix="export it with an ICC profile or as sRGB, or remove it")


def _cicp_of_png(file: BinaryIO) -> tuple[int, int, int, int] | None:
    """Return the content of the chunk cICP, which Pillow does not read."""
    # Chunks are length (4 bytes, big endian), type (4), data and checksum (4); pixels follow the metadata.
    position = file.tell()
    try:
        file.seek(8)
        while len(header := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", header)
            if kind == b"IDAT":
                return None
            if kind == b"cICP" and length == 4:
                return struct.unpack("4B", file.read(4))
            file.seek(length + 4, io.SEEK_CUR)
        return None
    finally:
        file.seek(position)


def _nclx_of_avif(file: BinaryIO) -> tuple[int, int] | None:
    """Return the colour primaries and transfer characteristics of the primary image."""
    position = file.tell()
    try:
        meta = dict(boxes(_meta_of(file)[4:]))
        properties = dict(boxes(meta[b"iprp"]))
        all_properties = list(boxes(properties[b"ipco"]))
        primary = primary_item(meta[b"pitm"])
        for item, index in properties_by_item(properties[b"ipma"]):
            if item != primary:
                continue
            kind, content = all_properties[index - 1]
            if kind == b"colr" and content[:4] == b"nclx":
                return struct.unpack(">HH", content[4:8])
        return None
    # Only decoding shows whether the file is damaged, or merely has other metadata.
    except (KeyError, IndexError, struct.error):
        return None
    finally:
        file.seek(position)


def _meta_of(file: BinaryIO) -> bytes:
    file.seek(0)
    while len(header := file.read(8)) == 8:
        size, kind = struct.unpack(">I4s", header)
        if size < 8:  # longer than 4 GB, or up to the end of the file
            break
        if kind == b"meta":
            return file.read(min(size - 8, _MAX_META_BYTES))
        file.seek(size - 8, io.SEEK_CUR)
    return b""


# Profiles.

_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
"""Cone response of Bradford's adaptation, which ICC.1 recommends."""

_D50 = np.array([0.9642, 1.0, 0.8249])
"""XYZ of the white of the profile connection space."""


def _to_xyz(chromaticities: tuple[float, ...]) -> npt.NDArray[np.float64] | None:
    """Return the matrix (3, 3) from linear light to XYZ; None if no light has these chromaticities."""
    x, y = np.array(chromaticities, np.float64).reshape(4, 2).T
    if len(chromaticities) != 8 or (y <= 0).any():
        return None
    white, *primaries = np.stack([x / y, np.ones(4), (1 - x - y) / y], axis=1)
    columns = np.stack(primaries, axis=1)
    if abs(np.linalg.det(columns)) < 1e-6:
        return None
    shares = np.linalg.solve(columns, white)
    return columns * shares if (shares > 0).all() else None


def _profile(chromaticities: tuple[float, ...], gamma: float | None) -> bytes:
    """Return a display profile (ICC.1) with the same curve for red, green and blue."""
    to_xyz: Any = _to_xyz(chromaticities)
    cones = _BRADFORD @ to_xyz.sum(axis=1)
    adapted = np.linalg.inv(_BRADFORD) @ np.diag(_BRADFORD @ _D50 / cones) @ _BRADFORD @ to_xyz

    # Parametric curves: type 0 is a power, type 3 a power with a linear start.
    kind, *numbers = (0, gamma) if gamma else (3, 2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
    curve = b"para\0\0\0\0" + struct.pack(">HH", kind, 0) + _fixed(numbers)
    tags = [(b"wtpt", b"XYZ \0\0\0\0" + _fixed(_D50))]
    for colour, column in zip(b"rgb", adapted.T, strict=True):
        tags += [(b"%cXYZ" % colour, b"XYZ \0\0\0\0" + _fixed(column)), (b"%cTRC" % colour, curve)]

    table, contents = struct.pack(">I", len(tags)), b""
    for name, content in tags:
        table += name + struct.pack(">II", 128 + 4 + 12 * len(tags) + len(contents), len(content))
        contents += content
    header = struct.pack(
        ">I4xI4s4s4s12x4s", 128 + len(table) + len(contents), 0x02400000, b"mntr", b"RGB ", b"XYZ ", b"acsp"
    )
    header = header.ljust(68, b"\0") + _fixed(_D50)
    return header.ljust(128, b"\0") + table + contents


def _fixed(numbers: Any) -> bytes:
    """Return numbers as s15Fixed16Number."""
    return b"".join(struct.pack(">i", round(number * 65_536)) for number in numbers)
