# SPDX-License-Identifier: MIT
"""Building blocks of models."""

from .modules import Embedding, Linear, Module, ModuleList, RMSNorm

__all__ = ["Embedding", "Linear", "Module", "ModuleList", "RMSNorm"]
