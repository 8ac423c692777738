# SPDX-License-Identifier: MIT
"""Everything that a guest boots from, in the order of what needs what."""

from __future__ import annotations

import os
from pathlib import Path

from . import kernel, kernels, model, payload, qemu, roots
from .cache import build_lock
from .machine import Images
from .venv import install_host_packages


def build(model_file: Path | None = None) -> Images:
    """Builds what changed. With nothing changed this takes a fraction of a second."""
    with build_lock():
        install_host_packages()
        build_root = roots.build_root()
        guest_root = roots.guest_root()
        chosen = kernels.chosen(build_root, guest_root)
        # TOOLS=1: the same guest with more in it.
        files = roots.tools_root() if os.environ.get("VTPU_TOOLS") else guest_root
        emulator = qemu.build(build_root)
        init = kernel.build_init(build_root)
        weights = model_file or model.fetch()
        compiled = model.compile_ahead(weights)
        return Images(
            qemu=emulator,
            kernel=kernel.build_vmlinux(chosen),
            packed_kernel=None if chosen.image.name == "vmlinux" else chosen.image,
            initramfs=kernel.build_initramfs(chosen, init),
            root=kernel.build_root_image(build_root, files, chosen, init),
            payload=payload.build(build_root, chosen, compiled),
            model=payload.build_model_image(build_root, weights),
        )
