"""Cutting a rectangle out of a JPEG without decoding the rest.

Between two restart markers a JPEG's data depend on nothing before them (ITU-T T.81, E.1.4 and
F.1.1.5.1). Where the markers stand at regular places of every row of blocks, they part the image in
tiles, and any rectangle of tiles is, under a changed header, a JPEG by itself. Its pixels are those
of the whole image, as long as the decoder does not smooth colours over the edges of blocks, which
fast upsampling does not. A prepared dataset is encoded with such markers: a random crop, which has
half of an image's area on average, then takes half of the time to decode. Where its tiles are,
such a JPEG says in an application segment of its own (`with_table`), so that nobody has to look
for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.data.augmentation import Box

RESTART_INTERVAL = 0xDD  # the segment that says how many blocks of a row are between two markers
_SEQUENTIAL = (0xC0, 0xC1)  # frames: baseline and extended, Huffman-coded
_FIRST_RESTART = 0xD0  # of eight markers, in turn
_END_OF_IMAGE = b"\xff\xd9"
_APP15 = 0xEF  # the segment of the table: its name, then the tiles' lengths, two bytes each
_TABLE = b"tiles\0"
_LONGEST = 0xFFFF  # what two bytes hold


class Cut(NamedTuple):
    """A JPEG of a part of another one."""

    content: bytearray
    top: int  # where it begins in the other, in pixels
    left: int
    height: int
    width: int


class _Grid(NamedTuple):
    """Where a JPEG's tiles are, in pixels and in the file."""

    height: int  # of the image
    width: int
    size_at: int  # where height and width stand in the file, two bytes each
    tile_height: int
    tile_width: int
    start: int  # of the first tile's data; what is before it is the header
    begins: NDArray[np.int64]  # [rows, columns], of each tile's data
    ends: NDArray[np.int64]  # [rows, columns], where the marker after each stands


def interval_for(width: int, block: int) -> int:
    """How many blocks of a row to put between two restart markers so that rows have whole tiles.

    Two to four if that divides the row, as each marker costs a few bytes; else one.

    Args:
        width: of the image in pixels.
        block: width in pixels of what is coded together, 8 or more.
    """
    blocks = -(-width // block)
    return next((count for count in (4, 3, 2) if blocks % count == 0 and blocks > count), 1)


def with_table(content: bytes, segments: Iterable[tuple[int, int, int]]) -> bytes:
    """The same JPEG with a table of its tiles; as it is where it has none, or too large ones."""
    places = list(segments)
    grid = _read_grid(content, places)
    if grid is None:
        return content
    lengths = (grid.ends - grid.begins).ravel()
    table = _TABLE + lengths.astype(">u2").tobytes()
    if lengths.max() > _LONGEST or len(table) + 2 > _LONGEST:
        return content
    segment = bytes([0xFF, _APP15]) + (len(table) + 2).to_bytes(2, "big") + table
    first = places[0][2]  # the end of the segment that JFIF puts before all others
    return content[:first] + segment + content[first:]


def cut(
    content: bytes | memoryview, segments: Iterable[tuple[int, int, int]], box: Box
) -> Cut | None:
    """The smallest JPEG of whole tiles that holds a box; None where the image has no tiles.

    Args:
        segments: those before the first scan: marker, and where its content starts and ends.
        box: within the image.
    """
    grid = _read_grid(content, segments)
    if grid is None:
        return None
    first_row, first_column = box.top // grid.tile_height, box.left // grid.tile_width
    last_row = -(-(box.top + box.height) // grid.tile_height)
    last_column = -(-(box.left + box.width) // grid.tile_width)
    top, left = first_row * grid.tile_height, first_column * grid.tile_width
    height = min(last_row * grid.tile_height, grid.height) - top
    width = min(last_column * grid.tile_width, grid.width) - left

    # Each row of tiles comes with the marker behind it.
    markers = grid.ends[first_row:last_row, first_column:last_column]
    begins, ends = grid.begins[first_row:last_row, first_column], markers[:, -1] + 2
    view = memoryview(content)
    rows = zip(begins.tolist(), ends.tolist(), strict=True)
    part = bytearray().join([view[: grid.start], *(view[begin:end] for begin, end in rows)])
    part[grid.size_at : grid.size_at + 4] = (height << 16 | width).to_bytes(4, "big")

    # The markers are numbered anew, and the last one becomes the end.
    lengths = ends - begins
    moved = grid.start + 1 + np.cumsum(lengths) - ends
    places = (markers + moved[:, None]).ravel()
    np.frombuffer(part, np.uint8)[places] = np.arange(len(places)) & 7 | _FIRST_RESTART
    part[-2:] = _END_OF_IMAGE
    return Cut(part, top, left, height, width)


def _read_grid(
    content: bytes | memoryview, segments: Iterable[tuple[int, int, int]]
) -> _Grid | None:
    """The tiles of a sequential JPEG with one scan; None if it has none."""
    frame = interval = scan = 0
    table: NDArray[np.int64] | None = None
    for marker, place, end in segments:
        if marker in _SEQUENTIAL:
            frame = place
        elif marker == _APP15 and content[place : place + len(_TABLE)] == _TABLE:
            table = np.frombuffer(content[place + len(_TABLE) : end], ">u2").astype(np.int64)
        elif marker == RESTART_INTERVAL:
            interval = content[place] << 8 | content[place + 1]
        scan = end
    if not frame or not interval:
        return None
    height, width = (content[at] << 8 | content[at + 1] for at in (frame + 1, frame + 3))
    components = content[frame + 5]
    factors = [content[frame + 7 + 3 * number] for number in range(components)]
    block_width = 8 * max(factor >> 4 for factor in factors)
    block_height = 8 * max(factor & 15 for factor in factors)
    if components == 1:
        block_width = block_height = 8  # a scan of one component has no other blocks
    if content[scan + 4] != components:
        return None
    rows, blocks = -(-height // block_height), -(-width // block_width)
    columns, rest = divmod(blocks, interval)
    if rest or bytes(content[-2:]) != _END_OF_IMAGE:
        return None
    start = scan + 4 + (content[scan + 2] << 8 | content[scan + 3]) - 2
    ends = _markers(content, start) if table is None else start + np.cumsum(table + 2) - 2
    if len(ends) != rows * columns or ends[-1] != len(content) - 2:
        return None
    if table is not None and (np.frombuffer(content, np.uint8)[ends] != 0xFF).any():
        return None
    begins = np.empty_like(ends)
    begins[0] = start
    np.add(ends[:-1], 2, out=begins[1:])
    return _Grid(
        height=height,
        width=width,
        size_at=frame + 1,
        tile_height=block_height,
        tile_width=block_width * interval,
        start=start,
        begins=begins.reshape(rows, columns),
        ends=ends.reshape(rows, columns),
    )


def _markers(content: bytes | memoryview, start: int) -> NDArray[np.int64]:
    """Where the markers of a scan's data stand, its end included: int64[n], ascending."""
    data = np.frombuffer(content, np.uint8, offset=start)
    candidates = np.flatnonzero(data[:-1] == 0xFF)
    following = data[candidates + 1]
    # 0xFF 0x00 stands for the byte 0xFF in the data (ITU-T T.81, B.1.1.5).
    places: NDArray[np.int64] = candidates[(following != 0x00) & (following != 0xFF)]
    return places + start
