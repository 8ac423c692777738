# SPDX-License-Identifier: MIT
"""One instruction: its fields, its 64 bytes, and the checks between them."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from . import hw
from .ir import CompileError

_LAYOUT = struct.Struct("<8B II 8B 8I Q")
_BY_CODE = {info.code: info for info in hw.OPS.values()}
_FMT_NAMES = {code: name for name, code in hw.FMT.items()}
_MAX_OPERANDS = 8
_NONE = (0, 0)


@dataclass(frozen=True, slots=True)
class Instr:
    """operands: (register, immediate) in the operation's order; register 0 is zero."""

    op: str
    operands: tuple[tuple[int, int], ...] = ()
    fmt: str = "NONE"
    flags: int = 0
    mode: int = 0
    signal: int = 0
    wait: int = 0
    wait_reg: int = 0
    wait_imm: int = 0
    aux: int = 0
    imm64: int = 0

    @property
    def info(self) -> hw.OpInfo:
        return hw.OPS[self.op]


def f32_bits(value: float) -> int:
    """The bits of an f32, for aux."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    assert isinstance(bits, int)
    return bits


def bits_f32(bits: int) -> float:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    assert isinstance(value, float)
    return value


def pack_imm64(op: str, fields: dict[str, int]) -> int:
    """Joins the bit fields of an operation's imm64."""
    word = 0
    layout = hw.OPS[op].imm64_fields
    if fields.keys() != layout.keys():
        raise CompileError(f"{op} takes the fields {', '.join(layout)}")
    for name, (low, high) in layout.items():
        if not 0 <= fields[name] < 1 << (high - low + 1):
            raise CompileError(f"{op}: {name} {fields[name]} does not fit {high - low + 1} bits")
        word |= fields[name] << low
    return word


def unpack_imm64(op: str, word: int) -> dict[str, int]:
    return {
        name: word >> low & ((1 << (high - low + 1)) - 1)
        for name, (low, high) in hw.OPS[op].imm64_fields.items()
    }


def encode(instr: Instr) -> bytes:
    """Raises CompileError when a field is out of its range."""
    check(instr)
    pad = (_NONE,) * (_MAX_OPERANDS - len(instr.operands))
    regs, imms = zip(*instr.operands, *pad, strict=True)
    return _LAYOUT.pack(
        instr.info.code, instr.flags, instr.signal, instr.wait, instr.wait_reg,
        hw.FMT[instr.fmt], 0, instr.mode, instr.wait_imm, instr.aux, *regs, *imms, instr.imm64,
    )  # fmt: skip


def decode(data: bytes) -> Instr:
    """Raises CompileError when the device would not accept the bytes."""
    if len(data) != hw.INSTR_BYTES:
        raise CompileError(f"an instruction is {hw.INSTR_BYTES} bytes, not {len(data)}")
    fields = _LAYOUT.unpack(data)
    code, flags, signal, wait, wait_reg, fmt_a, fmt_b, mode, wait_imm, aux = fields[:10]
    info = _BY_CODE.get(code)
    if info is None:
        raise CompileError(f"there is no operation 0x{code:02x}")
    count = len(info.operands)
    operands = tuple(zip(fields[10:18], fields[18:26], strict=True))
    if fmt_b or any(operand != _NONE for operand in operands[count:]):
        raise CompileError(f"{info.name}: a reserved field is not zero")
    if fmt_a not in _FMT_NAMES:
        raise CompileError(f"{info.name}: there is no format {fmt_a}")
    instr = Instr(
        info.name, operands[:count], _FMT_NAMES[fmt_a], flags, mode, signal,
        wait, wait_reg, wait_imm, aux, fields[26],
    )  # fmt: skip
    check(instr)
    return instr


def check(instr: Instr) -> None:
    """Every field against the operation's entry in hw.OPS."""
    info = hw.OPS.get(instr.op)
    if info is None:
        raise CompileError(f"there is no operation {instr.op}")
    if len(instr.operands) != len(info.operands):
        raise CompileError(f"{instr.op} has {len(info.operands)} operands")
    for (reg, imm), (name, kind) in zip(instr.operands, info.operands, strict=True):
        _check_operand(info, name, kind, reg, imm)
    allowed = 0
    for bit in info.flags.values():
        allowed |= bit
    _need(info, not instr.flags & ~allowed, "flags", instr.flags)
    _need(info, instr.mode in (info.modes.values() or (0,)), "mode", instr.mode)
    _need(info, instr.fmt in (info.fmt_a or ("NONE",)), "format", instr.fmt)
    _need(info, 0 <= instr.signal < hw.NUM_COUNTERS, "signal", instr.signal)
    _need(info, 0 <= instr.wait < hw.NUM_COUNTERS, "wait", instr.wait)
    _need(info, 0 <= instr.wait_reg < hw.NUM_SREGS, "wait_reg", instr.wait_reg)
    _need(info, 0 <= instr.wait_imm < 1 << 32, "wait_imm", instr.wait_imm)
    if not instr.wait:
        _need(info, not instr.wait_reg and not instr.wait_imm, "wait_imm", instr.wait_imm)
    _need(info, 0 <= instr.aux < 1 << 32, "aux", instr.aux)
    _need(info, info.has_aux or not instr.aux, "aux", instr.aux)
    _need(info, 0 <= instr.imm64 < 1 << 64, "imm64", instr.imm64)
    if not info.imm64 and not info.imm64_fields:
        _need(info, not instr.imm64, "imm64", instr.imm64)


def _check_operand(info: hw.OpInfo, name: str, kind: str, reg: int, imm: int) -> None:
    _need(info, 0 <= reg < hw.NUM_SREGS, f"register of {name}", reg)
    _need(info, 0 <= imm < 1 << 32, name, imm)
    if kind == "rd":
        _need(info, reg > 0 and imm == 0, f"destination {name}", reg)
    elif reg:
        return  # known only when it runs
    elif kind in ("v", "v4"):
        align = 64 if kind == "v" else 4
        _need(info, imm % align == 0 and imm < hw.VMEM_BYTES, name, imm)
    elif kind == "n":
        _need(info, imm <= 1 << 20, name, imm)
    elif kind == "stride":
        dense = info.engine == "DMA"
        _need(info, imm < 1 << 31 and (dense or imm % 4 == 0), name, imm)
    elif kind == "pc":
        _need(info, imm % hw.INSTR_BYTES == 0, name, imm)


def _need(info: hw.OpInfo, condition: bool, what: str, value: object) -> None:
    if not condition:
        raise CompileError(f"{info.name}: {what} {value} is out of range")
