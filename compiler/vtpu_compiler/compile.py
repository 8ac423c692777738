# SPDX-License-Identifier: MIT
"""The whole way from a graph to an executable."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import hw
from .elf import write_elf
from .ir import Dim, Graph, Type, max_size
from .passes.canonicalise import Canonicalise
from .passes.codegen import Code, Codegen
from .passes.fuse import Fuse
from .passes.lower import Lower
from .passes.narrow import Narrow
from .passes.plan import Plan
from .passes.schedule import Schedule
from .printer import format_graph
from .reader import METADATA_VERSION
from .tile import Field, Program
from .verify import verify

STAGES = ("graph", "canonical", "narrow", "fused", "lowered", "planned", "scheduled", "machine")
Stage = Graph | Program | Code


@dataclass(frozen=True, slots=True)
class Options:
    """canonicalise to codegen: the passes, with their options.

    keep: stages whose text goes into the executable (.tpu.ir.<stage>).
    check: verify the finished binary.
    """

    canonicalise: Canonicalise = field(default_factory=Canonicalise)
    narrow: Narrow = field(default_factory=Narrow)
    fuse: Fuse = field(default_factory=Fuse)
    lower: Lower = field(default_factory=Lower)
    plan: Plan = field(default_factory=Plan)
    schedule: Schedule = field(default_factory=Schedule)
    codegen: Codegen = field(default_factory=Codegen)
    keep: tuple[str, ...] = ("fused",)
    check: bool = True

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(slots=True)
class Executable:
    """elf: the file. stages: the text after each stage, for people to read."""

    elf: bytes
    metadata: dict[str, Any]
    key: bytes
    stages: dict[str, str] = field(default_factory=dict)


def compile_graph(
    graph: Graph,
    options: Options | None = None,
    *,
    record: Callable[[str, str], None] | None = None,
) -> Executable:
    """Compiles a graph, which is not changed. Raises CompileError.

    record: called with every stage's name and text as soon as it exists.
    """
    options = options or Options()
    stages: dict[str, str] = {}

    def note(name: str, stage: Stage) -> None:
        stages[name] = _format(stage)
        if record is not None:
            record(name, stages[name])

    verify(graph)
    note("graph", graph)
    key = cache_key(stages["graph"], options)
    graph = options.canonicalise.run(graph)
    note("canonical", graph)
    graph = options.narrow.run(graph)
    note("narrow", graph)
    graph = options.fuse.run(graph)
    verify(graph)
    note("fused", graph)
    program = options.lower.run(graph)
    note("lowered", program)
    program = options.plan.run(program)
    note("planned", program)
    program = options.schedule.run(program)
    note("scheduled", program)
    code = options.codegen.run(program)
    note("machine", code)
    binary = code.encode()
    metadata = make_metadata(program, code, binary, options)
    texts = {name: stages[name] for name in options.keep}
    elf = write_elf(code, binary, metadata, key, texts)
    if options.check:
        from .check import check_executable

        check_executable(elf)
    return Executable(elf, metadata, key, stages)


def cache_key(graph_text: str, options: Options) -> bytes:
    """sha256 of everything that the executable depends on."""
    digest = hashlib.sha256()
    for part in (graph_text, repr(options), compiler_digest()):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


@functools.cache
def compiler_digest() -> str:
    """Of the compiler's own sources, which include the hardware's tables."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _format(stage: Stage) -> str:
    if isinstance(stage, Graph):
        return format_graph(stage)
    if isinstance(stage, Program):
        return str(stage)
    from .objdump import format_code

    return format_code(stage)


def _shape(type_: Type) -> list[int | str]:
    return [size.name if isinstance(size, Dim) else size for size in type_.shape]


def _dtype(place: Field) -> str:
    """The words of the launch block itself are unsigned."""
    return {"length": "u32", "pointer": "u64"}.get(place.kind, place.type.dtype)


def make_metadata(program: Program, code: Code, binary: bytes, options: Options) -> dict[str, Any]:
    """What a runtime needs to know to launch the kernel."""
    return {
        "version": METADATA_VERSION,
        "isa_version": hw.ISA_VERSION,
        "arguments": list(program.arguments),
        "kernels": {
            program.name: {
                "entry": 0,
                "code_bytes": len(binary),
                "instructions": len(code.lines),
                "vmem_bytes": program.peak,
            }
        },
        "code_sha256": hashlib.sha256(binary).hexdigest(),
        "traps": {str(number): meaning for number, meaning in code.traps.items()},
        "lengths": {
            place.name: place.most for place in program.fields.values() if place.kind == "length"
        },
        "launch": {
            "bytes": program.launch_bytes,
            "fields": [
                {
                    "name": place.name,
                    "kind": place.kind,
                    "offset": place.offset,
                    "bytes": place.bytes,
                    "shape": _shape(place.type),
                    "max_shape": [max_size(size) for size in place.type.shape],
                    "dtype": _dtype(place),
                }
                for place in program.fields.values()
            ],
        },
        "weights": {
            "bytes": program.weight_bytes,
            "entries": [
                {
                    "name": entry.name,
                    "offset": entry.offset,
                    "bytes": entry.bytes,
                    "dtype": entry.type.dtype,
                    "format": entry.format,
                    "shape": _shape(entry.type),
                    "parts": list(entry.parts),
                }
                for entry in program.weights
            ],
        },
        "states": _states(program),
        "options": options.as_dict(),
    }


def _states(program: Program) -> list[dict[str, Any]]:
    if not program.states:
        return []
    slots = program.slots
    return [
        {
            "name": "state",
            "slots": slots.name if isinstance(slots, Dim) else slots,
            "max_slots": max_size(slots),
            "slot_bytes": sum(entry.bytes for entry in program.states),
            "parts": [
                {
                    "name": entry.name,
                    "slot_offset": entry.offset,
                    "slot_bytes": entry.bytes,
                    "dtype": entry.type.dtype,
                    "width": entry.type.shape[1],
                }
                for entry in program.states
            ],
        }
    ]
