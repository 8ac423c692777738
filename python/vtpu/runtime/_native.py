# SPDX-License-Identifier: MIT
"""The extension module, untyped; everything else here is typed.

Each object holds its C handle in a cdata whose destructor releases it. Closing drops
the handle, never releases it at once: another thread may be in a call with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _load() -> Any:
    try:
        return import_module("vtpu.runtime._tpurt")
    except ModuleNotFoundError:
        pass
    try:
        return import_module("_tpurt")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error}; build it with vtpu/runtime/ffi_build.py, and put its folder on the "
            "Python path",
            name="_tpurt",
        ) from error


_module = _load()
ffi: Any = _module.ffi
lib: Any = _module.lib

if lib.tpurt_version() >> 16 != lib.TPURT_VERSION_MAJOR:
    raise ImportError(
        f"libtpurt has version {lib.tpurt_version() >> 16}, "
        f"the extension was built for {lib.TPURT_VERSION_MAJOR}",
        name="_tpurt",
    )


def new_struct(name: str) -> Any:
    """A zeroed structure of the library with its struct_size set."""
    value = ffi.new(f"{name} *")
    value.struct_size = ffi.sizeof(name)
    return value
