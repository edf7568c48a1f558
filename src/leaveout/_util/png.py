"""Arrays as pictures: small PNG files, encoded by hand, for pages that need no other files."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
from jaxtyping import Shaped, UInt8

COLOURS = {2: 0, 3: 2, 4: 6}
"""PNG's colour types: grey, RGB, RGBA, by the number of channels that the shapes below imply."""


def is_picture(array: np.ndarray) -> bool:
    """Say whether an array has the shape of an image: H x W, 1|3 x H x W, or H x W x 3|4.

    >>> [is_picture(np.zeros(shape)) for shape in ((8, 8), (3, 32, 32), (16, 16, 3), (64,), (2, 5), (7, 8, 8))]
    [True, True, True, False, False, False]
    """
    if array.ndim == 2:
        return min(array.shape) >= 4
    return array.ndim == 3 and array.size > 0 and (array.shape[0] in (1, 3) or array.shape[2] in (3, 4))


def pixels(array: np.ndarray, side: int = 160) -> UInt8[np.ndarray, "height width *channels"]:
    """Return an image's values as bytes, its longer side at most ``side``.

    Values from 0 to 1 are kept, and so are bytes; anything else (standardised inputs) is stretched over its range.

    >>> pixels(np.array([[0.0, 1.0], [0.5, 0.25]])).tolist()
    [[0, 255], [128, 64]]
    >>> pixels(np.array([[[-2.0, 2.0]]])).tolist()
    [[0, 255]]
    """
    if array.ndim == 3 and array.shape[0] in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    values = np.nan_to_num(array.astype(np.float64), posinf=0.0, neginf=0.0)
    if array.dtype == np.uint8:
        values /= 255
    elif values.min() < 0 or values.max() > 1:
        values = (values - values.min()) / (values.max() - values.min() or 1.0)
    return np.floor(_shrunk(values, side) * 255 + 0.5).astype(np.uint8)


def _shrunk(values: Shaped[np.ndarray, "height width *channels"], side: int) -> np.ndarray:
    """Average over square blocks, so that the longer side fits."""
    factor = -(-max(values.shape[:2]) // side)
    if factor == 1:
        return values
    height, width = (max(1, length // factor) for length in values.shape[:2])
    region = values[: height * factor, : width * factor]
    blocks = region.reshape(height, -1, width, region.shape[1] // width, *values.shape[2:])
    return blocks.mean(axis=(1, 3))


def png(image: UInt8[np.ndarray, "height width *channels"]) -> bytes:
    """Return the bytes of a PNG file: grey (H x W), RGB (H x W x 3) or RGBA (H x W x 4)."""
    height, width = image.shape[:2]
    colour = COLOURS[2 if image.ndim == 2 else image.shape[2]]
    raw = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(image))

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def data_uri(image: UInt8[np.ndarray, "height width *channels"]) -> str:
    """Return the picture as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()
