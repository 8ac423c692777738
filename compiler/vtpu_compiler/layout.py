# SPDX-License-Identifier: MIT
"""Weight packing: rows as model files store them -> the device's tiles.

A matrix of blocks arrives as rows of 32-value blocks (GGUF's Q8_0, Q4_0 and
Q4_1 layouts), one of i8 as all its rows of int8 and then an f32 scale a row, one
of bf16 as its rows. Each becomes tiles of 16 rows as the hardware's table
describes them. What no matmul takes passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from . import hw
from .ir import ELEMENT_BYTES, QUANTISED, CompileError
from .ops import tile_format

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK = 32  # values that share a scale
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}

# A params's element type, shape, and bytes as the model file stores them.
Raw = tuple[str, Sequence[int], Any]


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor in the weight image (and, for all formats, in a file)."""
    if dtype in QUANTISED:
        rows, columns = shape
        format_ = dtype.upper()
        across = hw.TILE_COLS[format_]
        if rows % hw.TILE_ROWS or columns % across:
            raise CompileError(
                f"a {dtype} matrix of {rows}x{columns} is not whole tiles of "
                f"{hw.TILE_ROWS}x{across}"
            )
        tile_row = columns // across * hw.TILE_BYTES[format_] + hw.TILE_TAIL[format_]
        return rows // hw.TILE_ROWS * tile_row
    return math.prod(shape) * ELEMENT_BYTES[dtype]


def pack_matrix(dtype: str, shape: Sequence[int], raw: Any, out: NDArray[np.uint8]) -> None:
    """Packs the matrix of a matmul into out, a byte array of tensor_bytes()."""
    import numpy as np

    if dtype in _WIDE:
        _pack_wide(dtype, shape, raw, out)
        return
    rows, columns = shape
    grid = (rows // hw.TILE_ROWS, hw.TILE_ROWS, columns // BLOCK, BLOCK_BYTES[dtype])
    # [tile row, tile column, row in tile, byte of block]
    blocks = np.frombuffer(raw, np.uint8).reshape(grid).transpose(0, 2, 1, 3)
    tiles = out.reshape(grid[0], grid[2], hw.TILE_BYTES[dtype.upper()])
    scale_bytes = 2 * hw.TILE_ROWS
    values = tiles[:, :, : tiles.shape[2] - _scales(dtype) * scale_bytes]
    groups = values.reshape(grid[0], grid[2], -1, hw.TILE_ROWS, 4)
    first = 2 * _scales(dtype)
    # A quantised byte of a file's 4-bit block holds columns i and i + 16 in its
    # two nibbles, just as a tile's does, so that both formats only move bytes
    # and a 32-bit move carries the four columns of a group.
    source = np.ascontiguousarray(blocks[..., first:]).view(np.uint32)
    groups.view(np.uint32)[..., 0] = source.transpose(0, 1, 3, 2)
    for scale in range(_scales(dtype)):
        at = values.shape[2] + scale * scale_bytes
        pairs = tiles[:, :, at : at + scale_bytes].reshape(grid[0], grid[2], hw.TILE_ROWS, 2)
        pairs[...] = blocks[..., 2 * scale : 2 * scale + 2]


def unpack_matrix(dtype: str, shape: Sequence[int], tiles: Any) -> bytes:
    """The inverse of pack_matrix: the bytes of a file."""
    import numpy as np

    if dtype in _WIDE:
        return _unpack_wide(dtype, shape, tiles)
    rows, columns = shape
    down, across = rows // hw.TILE_ROWS, columns // BLOCK
    data = np.frombuffer(tiles, np.uint8).reshape(down, across, -1)
    out = np.empty((down, hw.TILE_ROWS, across, BLOCK_BYTES[dtype]), np.uint8)
    blocks = out.transpose(0, 2, 1, 3)
    scales = _scales(dtype)
    end = data.shape[2] - scales * 2 * hw.TILE_ROWS
    groups = data[:, :, :end].reshape(down, across, -1, hw.TILE_ROWS, 4)
    blocks[..., 2 * scales :] = groups.transpose(0, 1, 3, 2, 4).reshape(
        down, across, hw.TILE_ROWS, -1
    )
    for scale in range(scales):
        at = end + scale * 2 * hw.TILE_ROWS
        pairs = data[:, :, at : at + 2 * hw.TILE_ROWS]
        blocks[..., 2 * scale : 2 * scale + 2] = pairs.reshape(down, across, hw.TILE_ROWS, 2)
    return out.tobytes()


_WIDE = ("i8", "bf16")  # tiles of 64 bytes of a row, scales in the tail


def _split_i8(raw: Any, rows: int, columns: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Bytes of the integers [rows, columns], and of the scales [rows, 4]."""
    import numpy as np

    data = np.frombuffer(raw, np.uint8)
    return data[: rows * columns].reshape(rows, columns), data[rows * columns :].reshape(rows, 4)


def _wide_parts(
    dtype: str, shape: Sequence[int], out: NDArray[np.uint8]
) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Views of tiles: words of four bytes of a row [tile row, row, word], and the tails."""
    import numpy as np

    down = shape[0] // hw.TILE_ROWS
    tail = hw.TILE_TAIL[tile_format(dtype)]
    whole = out.reshape(down, -1)
    body = whole[:, : whole.shape[1] - tail]
    words = body.view(np.uint32).reshape(down, -1, hw.TILE_ROWS).transpose(0, 2, 1)
    return words, whole[:, body.shape[1] :].reshape(down, hw.TILE_ROWS, -1)


def _pack_wide(dtype: str, shape: Sequence[int], raw: Any, out: NDArray[np.uint8]) -> None:
    import numpy as np

    words, tails = _wide_parts(dtype, shape, out)
    values = np.frombuffer(raw, np.uint8)
    if dtype == "i8":
        values, scales = _split_i8(raw, *shape)
        tails[...] = scales.reshape(tails.shape)
    words[...] = values.reshape(*words.shape[:2], -1).view(np.uint32)


def _unpack_wide(dtype: str, shape: Sequence[int], tiles: Any) -> bytes:
    import numpy as np

    words, tails = _wide_parts(dtype, shape, np.frombuffer(tiles, np.uint8))
    return words.tobytes() + tails.tobytes()


def dequantise(dtype: str, shape: Sequence[int], raw: Any) -> NDArray[np.float32]:
    """A tensor as f32, from the bytes that a model file stores."""
    import numpy as np

    if dtype == "f32":
        return np.frombuffer(raw, np.float32).reshape(shape)
    if dtype == "f16":
        return np.frombuffer(raw, np.float16).reshape(shape).astype(np.float32)
    if dtype == "bf16":
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if dtype == "i8":
        rows, columns = shape
        q, d = _split_i8(raw, rows, columns)
        return q.view(np.int8).astype(np.float32) * d.view(np.float32)
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, BLOCK_BYTES[dtype])
    scales = blocks[:, : 2 * _scales(dtype)].copy().view(np.float16).astype(np.float32)
    payload = blocks[:, 2 * _scales(dtype) :]
    if dtype == "q8_0":
        q = payload.view(np.int8).astype(np.float32)
    else:
        q = np.concatenate([payload & 15, payload >> 4], axis=1).astype(np.float32)
        if dtype == "q4_0":
            q -= 8
    result = q * scales[:, :1]
    if dtype == "q4_1":
        result += scales[:, 1:]
    return result.reshape(shape)


def pack_weights(
    metadata: dict[str, Any],
    get_raw: Callable[[str], Raw],
    out: Any,
) -> None:
    """Builds the weight image that an executable's metadata describes.

    get_raw: name -> (element type, shape, bytes as the model file stores them).
    out: a writable buffer of at least metadata["weights"]["bytes"] bytes, or a
        file opened for writing in binary, which is written from its position.
    """
    total = metadata["weights"]["bytes"]
    if hasattr(out, "write"):
        _pack_file(metadata, get_raw, out)
        return
    import numpy as np

    image = np.frombuffer(out, np.uint8)
    if image.size < total:
        raise CompileError(f"the weight image needs {total} bytes, the buffer has {image.size}")
    if not image.flags.writeable:
        raise CompileError("the buffer for the weight image is read-only")
    for entry in metadata["weights"]["entries"]:
        at = entry["offset"]
        _pack_entry(entry, get_raw, image[at : at + entry["bytes"]])


def _pack_file(metadata: dict[str, Any], get_raw: Callable[[str], Raw], file: BinaryIO) -> None:
    import numpy as np

    at = 0
    for entry in sorted(metadata["weights"]["entries"], key=lambda entry: int(entry["offset"])):
        file.write(bytes(entry["offset"] - at))
        piece = np.empty(entry["bytes"], np.uint8)
        _pack_entry(entry, get_raw, piece)
        file.write(piece.data)
        at = entry["offset"] + entry["bytes"]
    file.write(bytes(metadata["weights"]["bytes"] - at))


def _pack_entry(
    entry: dict[str, Any], get_raw: Callable[[str], Raw], out: NDArray[np.uint8]
) -> None:
    import numpy as np

    at = rows = 0
    dtype = entry["dtype"]
    for name in entry["parts"]:
        found, shape, raw = get_raw(name)
        shape = tuple(shape)
        if found != dtype or shape[1:] != tuple(entry["shape"][1:]):
            raise CompileError(
                f"weight {name} is {found} {'x'.join(map(str, shape))}, the executable "
                f"needs {dtype} rows of {'x'.join(map(str, entry['shape'][1:])) or 'one value'}"
            )
        size = tensor_bytes(dtype, shape)
        data = np.frombuffer(raw, np.uint8)
        if data.size != size:
            raise CompileError(f"weight {name} has {data.size} bytes, not {size}")
        rows += shape[0]
        if at + size > out.size:
            break
        piece = out[at : at + size]
        if entry["format"] in hw.TILE_COLS:
            pack_matrix(dtype, shape, raw, piece)
        else:
            piece[:] = data
        at += size
    if rows != entry["shape"][0] or at != out.size:
        raise CompileError(
            f"weight {entry['name']} has {rows} rows, the executable needs {entry['shape'][0]}"
        )


def _scales(dtype: str) -> int:
    """f16 words at the start of a block: the scale, and Q4_1's minimum."""
    return 2 if dtype == "q4_1" else 1
