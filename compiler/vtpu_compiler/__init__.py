# SPDX-License-Identifier: MIT
"""The vTPU compiler: a traced graph in, an ELF executable out."""

from .builder import Graph
from .compile import Executable, Options, compile_graph
from .ir import CompileError, Dim, Type, Value
from .layout import pack_weights
from .reader import ElfFile, ExecutableError, read_elf, read_metadata

__all__ = [
    "CompileError",
    "Dim",
    "ElfFile",
    "Executable",
    "ExecutableError",
    "Graph",
    "Options",
    "Type",
    "Value",
    "compile_graph",
    "pack_weights",
    "read_elf",
    "read_metadata",
]
