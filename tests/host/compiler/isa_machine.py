# SPDX-License-Identifier: MIT
"""A small simulator of the instruction set that runs executables in numpy.

It shares nothing with the compiler but the decoder. Engines run beside each
other in any order that the waits allow, chosen by a seed: an instruction reads
its operands when it starts and writes its results when it ends, and others may
run in between, so that a missing wait shows as a wrong result. VMEM is NaN
until written.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from vtpu_compiler import hw, read_elf
from vtpu_compiler.asm import Instr, bits_f32, decode, unpack_imm64

VMEM_BYTES = 32 << 20
ARGUMENT_SPACE = 1 << 40  # argument i lies at (i + 1) times this
SKIP = 0xFFFFFFFF

Commit = Callable[[], None]


class DeviceFaultError(Exception):
    """What the device would stop the queue for."""


@dataclass
class Issued:
    instr: Instr
    values: dict[str, int]


@dataclass
class Machine:
    """memory: one array an argument; the launch block and states are written."""

    memory: list[np.ndarray]
    seed: int = 0
    vmem: np.ndarray = field(default_factory=lambda: np.full(VMEM_BYTES, 0xFF, np.uint8))
    counters: list[int] = field(default_factory=lambda: [0] * 32)
    executed: int = 0

    def run(self, elf: bytes) -> None:
        file = read_elf(elf)
        code = [decode(file.code[at : at + 64]) for at in range(0, len(file.code), 64)]
        chance = random.Random(self.seed)
        self.registers = [0] * 64
        for index in range(len(self.memory)):
            self.registers[8 + index] = (index + 1) * ARGUMENT_SPACE
        self.pc, self.halted = 0, False
        self.queues: dict[str, deque[Issued]] = {e: deque() for e in ("DMA", "MXU", "VPU")}
        self.running: dict[str, tuple[Issued, Commit]] = {}
        while not (self.halted and not any(self.queues.values()) and not self.running):
            choices: list[Callable[[], None]] = []
            if not self.halted and self.ready(code[self.pc // 64]):
                choices.append(lambda: self.step(code))
            for engine, queue in self.queues.items():
                if engine in self.running:
                    choices.append(lambda engine=engine: self.finish(engine))
                elif queue and self.ready(queue[0].instr):
                    choices.append(lambda engine=engine: self.start(engine))
            if not choices:
                raise DeviceFaultError(f"deadlock at pc 0x{self.pc:x}")
            chance.choice(choices)()

    def ready(self, instr: Instr) -> bool:
        if instr.op in ("SYNC", "HALT") and (any(self.queues.values()) or self.running):
            return False
        assert not instr.wait_reg
        return not instr.wait or self.counters[instr.wait] >= instr.wait_imm

    def step(self, code: list[Instr]) -> None:
        instr = code[self.pc // 64]
        self.executed += 1
        values = {
            name: (self.registers[reg] + imm) % 2**64
            for (reg, imm), (name, _) in zip(instr.operands, instr.info.operands, strict=True)
        }
        self.pc += 64
        if instr.info.engine != "SEQ":
            self.queues[instr.info.engine].append(Issued(instr, values))
            return
        result = None
        if instr.op == "HALT":
            self.halted = True
        elif instr.op == "LD":
            size = 8 if instr.mode else 4
            data = self.globe(values["addr"], size).tobytes()
            result = int.from_bytes(data, "little")
        elif instr.op == "ADD":
            result = values["a"] + values["b"]
        elif instr.op == "MUL":
            result = values["a"] * values["b"]
        elif instr.op == "BEQ":
            if values["a"] == values["b"]:
                self.pc = values["target"]
        elif instr.op == "BLT":
            if values["a"] < values["b"]:
                self.pc = values["target"]
        elif instr.op == "TRAP":
            raise DeviceFaultError(f"trap {values['code']}")
        elif instr.op not in ("NOP", "SYNC"):
            raise DeviceFaultError(f"{instr.op} is not simulated")
        if result is not None:
            self.registers[instr.operands[0][0]] = result % 2**64
        if instr.signal:
            self.counters[instr.signal] += 1

    def start(self, engine: str) -> None:
        issued = self.queues[engine].popleft()
        commit = getattr(self, issued.instr.op.lower())(issued.instr, **issued.values)
        self.running[engine] = (issued, commit)

    def finish(self, engine: str) -> None:
        issued, commit = self.running.pop(engine)
        commit()
        if issued.instr.signal:
            self.counters[issued.instr.signal] += 1

    # Memory -----------------------------------------------------------------
    def globe(self, address: int, size: int) -> np.ndarray:
        region, offset = divmod(address, ARGUMENT_SPACE)
        if not 1 <= region <= len(self.memory):
            raise DeviceFaultError(f"unmapped address 0x{address:x}")
        memory = self.memory[region - 1]
        if offset + size > memory.size:
            raise DeviceFaultError(f"0x{address:x}+{size} is outside argument {region - 1}")
        return memory[offset : offset + size]

    def rows(self, address: int, rows: int, row_bytes: int, stride: int) -> np.ndarray:
        """A view of rows of bytes in VMEM."""
        if rows and address + (rows - 1) * stride + row_bytes > VMEM_BYTES:
            raise DeviceFaultError(f"0x{address:x} is outside VMEM")
        return np.lib.stride_tricks.as_strided(self.vmem[address:], (rows, row_bytes), (stride, 1))

    def read(self, address: int, rows: int, width: int, stride: int | None = None) -> np.ndarray:
        stride = 4 * width if stride is None else stride
        return self.rows(address, rows, 4 * width, stride).copy().view(np.float32)

    def index(self, address: int, count: int, width: int = 1) -> np.ndarray:
        return self.rows(address, count, 4 * width, 4 * width).copy().view(np.uint32)

    def writer(self, address: int, stride: int, result: np.ndarray) -> Commit:
        data = np.ascontiguousarray(result)
        data = data.reshape(len(data), -1).view(np.uint8) if data.size else data[:, :0]

        def commit() -> None:
            if len(data):
                self.rows(address, len(data), data.shape[1], stride)[:] = data

        return commit

    # Operations ---------------------------------------------------------------
    def dma_load(self, _, dst, src, rows, row_bytes, dst_stride, src_stride) -> Commit:
        data = [self.globe(src + i * src_stride, row_bytes).copy() for i in range(rows)]
        return self.writer(dst, dst_stride, np.array(data, np.uint8).reshape(rows, row_bytes))

    def dma_store(self, _, dst, src, rows, row_bytes, dst_stride, src_stride) -> Commit:
        data = self.rows(src, rows, row_bytes, src_stride).copy()

        def commit() -> None:
            for i, row in enumerate(data):
                self.globe(dst + i * dst_stride, row_bytes)[:] = row

        return commit

    def dma_gather(self, instr, dst, table, index, count, width, table_rows, dst_stride) -> Commit:
        rows = self.index(index, count)[:, 0].astype(np.int64)
        if (rows >= table_rows).any():
            raise DeviceFaultError("gather index out of bounds")
        if instr.fmt in hw.TILE_COLS:
            values = tiles(instr.fmt, self.globe(table, tile_bytes(instr.fmt, table_rows, width)),
                           table_rows, width)[rows]  # fmt: skip
        else:
            dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[instr.fmt]
            data = self.globe(table, table_rows * width * np.dtype(dtype).itemsize)
            if instr.fmt == "BF16":
                data, dtype = (data.view(np.uint16).astype(np.uint32) << 16), np.float32
            values = data.view(dtype).reshape(table_rows, width)[rows].astype(np.float32)
        return self.writer(dst, dst_stride, values)

    def dma_scatter(self, instr, table, src, index, count, width, table_rows, src_stride) -> Commit:
        rows = self.index(index, count)[:, 0].astype(np.int64)
        dtype = {"F32": np.float32, "F16": np.float16}[instr.fmt]
        data = self.read(src, count, width, src_stride).astype(dtype)
        if ((rows >= table_rows) & (rows != SKIP)).any():
            raise DeviceFaultError("scatter index out of bounds")
        size = table_rows * width * np.dtype(dtype).itemsize

        def commit() -> None:
            state = self.globe(table, size).view(dtype).reshape(table_rows, width)
            for row, values in zip(rows, data, strict=True):
                if row != SKIP:
                    state[row] = values

        return commit

    def matmul(self, instr, dst, src, weight, m, n, k, dst_stride, src_stride) -> Commit:
        x = self.read(src, m, k, src_stride)
        if m == 0:
            return lambda: None
        matrix = tiles(instr.fmt, self.globe(weight, tile_bytes(instr.fmt, n, k)), n, k)
        result = x @ matrix.T
        if instr.flags:
            result = self.read(dst, m, n, dst_stride) + result
        return self.writer(dst, dst_stride, result)

    def v_rmsnorm(self, instr, dst, src, weight, rows, width, dst_stride, src_stride) -> Commit:
        x = self.read(src, rows, width, src_stride).astype(np.float64)
        scale = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + bits_f32(instr.aux))
        result = x * scale * self.read(weight, 1, width)
        return self.writer(dst, dst_stride, result.astype(np.float32))

    def v_add(self, _, dst, a, b, rows, width, dst_stride, a_stride, b_stride) -> Commit:
        result = self.read(a, rows, width, a_stride) + self.read(b, rows, width, b_stride)
        return self.writer(dst, dst_stride, result)

    def v_mul(self, _, dst, a, b, rows, width, dst_stride, a_stride, b_stride) -> Commit:
        result = self.read(a, rows, width, a_stride) * self.read(b, rows, width, b_stride)
        return self.writer(dst, dst_stride, result)

    def v_silu_mul(
        self, _, dst, gate, up, rows, width, dst_stride, gate_stride, up_stride
    ) -> Commit:
        g, u = self.read(gate, rows, width, gate_stride), self.read(up, rows, width, up_stride)
        return self.writer(dst, dst_stride, g / (1 + np.exp(-g)) * u)

    def v_take(self, _, dst, src, index, rows, width, src_rows, dst_stride, src_stride) -> Commit:
        wanted = self.index(index, rows)[:, 0].astype(np.int64)
        if (wanted >= src_rows).any():
            raise DeviceFaultError("take index out of bounds")
        return self.writer(dst, dst_stride, self.read(src, src_rows, width, src_stride)[wanted])

    def v_rope(
        self, instr, dst, src, cos_sin, rows, heads, head_dim, dst_stride, src_stride
    ) -> Commit:
        x = self.read(src, rows, heads * head_dim, src_stride)
        angles = self.read(cos_sin, rows, head_dim)
        out = np.empty_like(x)
        half = head_dim // 2
        for head in range(heads):
            for i in range(half):
                first = head * head_dim + (2 * i if instr.mode == 0 else i)
                second = first + (1 if instr.mode == 0 else half)
                c, s = angles[:, i], angles[:, half + i]
                out[:, first] = x[:, first] * c - x[:, second] * s
                out[:, second] = x[:, first] * s + x[:, second] * c
        return self.writer(dst, dst_stride, out)

    def v_attn(
        self, instr, dst, q, k_cache, v_cache, rows, row_info, block_tables, num_slots
    ) -> Commit:
        f = unpack_imm64(instr.op, instr.imm64)
        heads, kv_heads, head_dim = f["heads"], f["kv_heads"], f["head_dim"]
        scale, group = bits_f32(instr.aux), heads // kv_heads
        dtype = {"F32": np.float32, "F16": np.float16}[instr.fmt]
        size = num_slots * kv_heads * head_dim * np.dtype(dtype).itemsize
        keys, values = (
            self.globe(at, size).view(dtype).reshape(num_slots, kv_heads, head_dim)
            for at in (k_cache, v_cache)
        )
        queries = self.read(q, rows, heads * head_dim).reshape(rows, heads, head_dim)
        out = np.zeros((rows, heads, head_dim), np.float32)
        for row, (count, table) in enumerate(self.index(row_info, rows, 2).astype(np.int64)):
            if count > f["max_blocks"] * f["block_size"]:
                raise DeviceFaultError("too many keys")
            at = block_tables + 4 * f["max_blocks"] * table
            blocks = self.index(at, 1, f["max_blocks"])[0].astype(np.int64)
            slots = [blocks[j // f["block_size"]] * f["block_size"] + j % f["block_size"]
                     for j in range(count)]  # fmt: skip
            if any(slot >= num_slots for slot in slots):
                raise DeviceFaultError("block table out of bounds")
            for head in range(heads if count else 0):
                k = keys[slots, head // group].astype(np.float64)
                s = k @ queries[row, head] * scale
                p = np.exp(s - s.max())
                out[row, head] = p @ values[slots, head // group].astype(np.float64) / p.sum()
        return self.writer(dst, 4 * heads * head_dim, out.reshape(rows, heads * head_dim))

    def v_sample(self, _, dst, logits, params, rows, vocab, logits_stride) -> Commit:
        x = self.read(logits, rows, vocab, logits_stride).astype(np.float64)
        wanted = self.index(params, rows, 8)
        out = np.zeros((rows, 192), np.uint8)
        for row in range(rows):
            if wanted[row, 0]:
                raise DeviceFaultError("only greedy sampling is simulated")
            order = sorted(range(vocab), key=lambda i, row=row: (-x[row, i], i))
            logprobs = x[row] - x[row].max()
            logprobs -= np.log(np.exp(logprobs).sum())
            count = int(wanted[row, 3])
            data = struct.pack("<IfII", order[0], logprobs[order[0]], count, 0)
            data += struct.pack(f"<{count}I", *order[:count]).ljust(80, b"\0")
            data += struct.pack(f"<{count}f", *logprobs[order[:count]]).ljust(80, b"\0")
            out[row, : len(data)] = np.frombuffer(data, np.uint8)
        return self.writer(dst, 192, out)


def tile_bytes(fmt: str, rows: int, columns: int) -> int:
    if fmt == "BF16_TILES":
        return 2 * rows * columns
    if fmt == "I8":
        return rows * (columns + 4)
    return (rows // 16) * (columns // 32) * {"Q8_0": 544, "Q4_0": 288, "Q4_1": 320}[fmt]


def tiles(fmt: str, data: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A matrix from its tiles, element by element as the hardware's table says."""
    out = np.empty((rows, columns), np.float32)
    if fmt in ("I8", "BF16_TILES"):
        size = tile_bytes(fmt, 16, columns)
        for row in range(rows):
            tile_row, r = data[row // 16 * size :][:size], row % 16
            for column in range(columns):
                if fmt == "I8":
                    value = tile_row[column // 4 * 64 + 4 * r + column % 4].view(np.int8)
                    scale = tile_row[columns * 16 + 4 * r :][:4].view(np.float32)[0]
                    out[row, column] = np.float32(value) * scale
                else:
                    at = column // 2 * 64 + 4 * r + 2 * (column % 2)
                    bits = int(tile_row[at]) << 16 | int(tile_row[at + 1]) << 24
                    out[row, column] = np.array(bits, np.uint32).view(np.float32)
        return out
    size = tile_bytes(fmt, 16, 32)
    at = 0
    for top in range(0, rows, 16):
        for left in range(0, columns, 32):
            tile = data[at : at + size]
            at += size
            groups = tile[: 512 if fmt == "Q8_0" else 256].reshape(-1, 16, 4)
            scales = tile[groups.size :].copy().view(np.float16).astype(np.float32)
            for group in range(8):
                if fmt == "Q8_0":
                    q = groups[group].view(np.int8).astype(np.float32)
                else:
                    nibbles = groups[group % 4] >> 4 if group >= 4 else groups[group % 4] & 15
                    q = nibbles.astype(np.float32) - (8 if fmt == "Q4_0" else 0)
                values = q * scales[:16, None]
                if fmt == "Q4_1":
                    values += scales[16:, None]
                column = left + 4 * group
                out[top : top + 16, column : column + 4] = values
    return out
