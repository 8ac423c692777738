# SPDX-License-Identifier: MIT
"""The vTPU compiler: a traced graph in, an ELF executable out."""

from .builder import Graph
from .ir import CompileError, Dim, Type, Value

__all__ = ["CompileError", "Dim", "Graph", "Type", "Value"]
