"""Small pictures like photographs, and files of every kind that hold them."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from recipes.data.augmentation import Image


def picture(height: int, width: int, seed: int = 0) -> Image:
    """Soft shapes with some edges and a little noise: uint8[height, width, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 40.0
    waves = [
        sum(
            np.sin(x * rng.uniform(-3, 3) + y * rng.uniform(-3, 3) + rng.uniform(0, 6))
            for _ in range(4)
        )
        for _ in range(3)
    ]
    shapes = np.stack(waves, axis=2) * 30 + 128
    edge = (x + y * rng.uniform(0.3, 2)) % 4 < rng.uniform(1, 3)
    shapes[edge] = shapes[edge] * 0.6 + 20
    return (shapes + rng.normal(0, 2, shapes.shape)).clip(0, 255).astype(np.uint8)


def encoded(image: Image, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """A file's content. JPEGs have quality 92 unless told otherwise."""
    if kind == "JPEG":
        options.setdefault("quality", 92)
    stream = io.BytesIO()
    PIL.Image.fromarray(image).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def turned(image: Image, orientation: int) -> bytes:
    """A JPEG whose EXIF data ask for turning."""
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, exif=exif)


def kinds(image: Image) -> dict[str, bytes]:
    """One image in many kinds of file."""
    options: dict[str, dict[str, Any]] = {
        "4:4:4": {"subsampling": 0},
        "4:2:2": {"subsampling": 1},
        "4:2:0": {"subsampling": 2},
        "progressive": {"progressive": True},
        "restarts": {"restart_marker_rows": 1},
        "grey": {"mode": "L"},
        "cmyk": {"mode": "CMYK"},
        "rgb": {"keep_rgb": True},
        "comment": {"comment": b"\xff\xd9" * 9},
    }
    jpegs = {f"jpeg {name}": encoded(image, **chosen) for name, chosen in options.items()}
    others = {
        "png": encoded(image, "PNG"),
        "grey png": encoded(image, "PNG", "L"),
        "palette": encoded(image, "PNG", "P"),
        "webp": encoded(image, "WEBP"),
        "bmp": encoded(image, "BMP"),
    }
    return jpegs | others | {f"turned {value}": turned(image, value) for value in range(1, 9)}


def claiming(width: int, height: int) -> dict[str, bytes]:
    """Small files, by name, that say that they hold so many pixels; at most 65,535 a side."""
    small, sizes = picture(16, 16), struct.pack(">HH", height, width)
    baseline, progressive = bytearray(encoded(small)), bytearray(encoded(small, progressive=True))
    for content, marker in ((baseline, b"\xff\xc0"), (progressive, b"\xff\xc2")):
        at = content.index(marker) + 5
        content[at : at + 4] = sizes
    png = bytearray(encoded(small, "PNG"))
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    bitmap = bytearray(encoded(small, "BMP"))
    bitmap[18:26] = struct.pack("<II", width, height)
    gif = bytearray(encoded(small, "GIF", "P"))
    gif[6:10] = struct.pack("<HH", width, height)
    files = {"jpeg": baseline, "progressive": progressive, "png": png, "bmp": bitmap, "gif": gif}
    return {name: bytes(content) for name, content in files.items()}


def photo_folder(root: Path, train: list[bytes], held_out: list[bytes]) -> Path:
    """Two classes, dealt out in turn, in the order of the datasets' indices: 0 0 0 … 1 1 1 …"""
    for split, contents in (("train", train), ("val", held_out)):
        half = -(-len(contents) // 2)
        for number, content in enumerate(contents):
            path = root / split / f"class{number // half}" / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return root
