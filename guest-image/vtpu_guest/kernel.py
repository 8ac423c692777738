# SPDX-License-Identifier: MIT
"""The kernel as QEMU starts it, and the initramfs that leads to the root image."""

from __future__ import annotations

import lzma
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from . import cpio
from .cache import GUEST_IMAGE, cache_dir, fresh, key, log_dir, need_space, prune
from .kernels import Kernel
from .privileged import run_in_root, run_privileged
from .roots import identity
from .stage import Stage, StageError

# Needed to reach the root image, plus what every guest uses.
BOOT_MODULES = ["virtio_blk", "virtio_net", "virtio_rng", "crc32c_generic", "erofs", "overlay"]
# Newer kernels have it in a library, which depmod knows to be needed.
_LATER_GONE = {"crc32c_generic"}
_NOBITS = 8  # a section without bytes in the file
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_INIT = GUEST_IMAGE / "init"
# Changed by hand with the way that images are packed.
_IMAGE_RECIPE = "2"


class Modules:
    """What depmod found out about a kernel's modules."""

    def __init__(self, kernel: Kernel) -> None:
        self.folder = kernel.modules / kernel.release
        self._needs: dict[str, list[str]] = {}
        self._paths: dict[str, str] = {}
        for line in (self.folder / "modules.dep").read_text().splitlines():
            path, _, needs = line.partition(":")
            name = _name(path)
            self._paths[name] = path
            self._needs[name] = [_name(need) for need in needs.split()]
        builtin = (self.folder / "modules.builtin").read_text().split()
        self._builtin = {_name(path) for path in builtin}

    def order(self, names: Iterable[str]) -> list[str]:
        """The named modules and what they need, each after what it needs."""
        found: list[str] = []

        def visit(name: str) -> None:
            if name in found or name in self._builtin:
                return
            if name not in self._needs and name in _LATER_GONE:
                return
            if name not in self._needs:
                raise StageError(f"the guest's kernel has no module {name}")
            for need in self._needs[name]:
                visit(need)
            found.append(name)

        for name in names:
            visit(name.replace("-", "_"))
        return found

    def read(self, name: str) -> bytes:
        """A module's ELF file. Debian compresses them; under emulation that costs."""
        data = (self.folder / self._paths[name]).read_bytes()
        return lzma.decompress(data) if self._paths[name].endswith(".xz") else data


def _name(path: str) -> str:
    return Path(path).name.split(".ko")[0].replace("-", "_")


def build_vmlinux(kernel: Kernel) -> Path:
    """The kernel as an ELF file, which QEMU starts directly (PVH).

    Debian's own bzImage works too, but would be decompressed under emulation
    at every boot.
    """
    if kernel.image.name == "vmlinux":
        return kernel.image
    target = cache_dir() / f"vmlinux-{key(kernel.identity)}"
    if not target.is_file():
        with Stage("kernel"), fresh(target) as work:
            need_space(cache_dir(), 100, "the kernel")
            image = kernel.image.read_bytes()
            start = image.find(_ZSTD_MAGIC)
            if start < 0:
                raise StageError(f"Debian's kernel {kernel.release} is not compressed with zstd")
            packed = work.with_suffix(".zst")
            packed.write_bytes(image[start:])
            try:
                # What follows the compressed kernel is no zstd frame, and zstd
                # says so after it has written the kernel.
                with open(work, "wb") as sink:
                    subprocess.run(
                        ["zstd", "-dcq", str(packed)],
                        stdout=sink,
                        stderr=subprocess.DEVNULL,
                        check=False,
                    )
            finally:
                packed.unlink()
            if not is_whole_elf(work):
                raise StageError(f"Debian's image of {kernel.release} gave no whole ELF kernel")
    prune("vmlinux-*", target)
    return target


def is_whole_elf(path: Path) -> bool:
    """Whether a file has all that the ELF section table says."""
    data = path.read_bytes()
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return False
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    if len(data) < table + size * count:
        return False
    for at in range(table, table + size * count, size):
        kind, offset, length = struct.unpack_from("<4xI16xQQ", data, at)
        if kind != _NOBITS and len(data) < offset + length:
            return False
    return True


def build_init(root: Path) -> Path:
    target = cache_dir() / f"init-{key(identity(root), _INIT)}"
    if not target.is_dir():
        with Stage("init") as stage, fresh(target) as work:
            run_in_root(
                stage,
                root,
                ["make", "-s", "-C", "/source", "OUT=/out"],
                log_dir() / "init.log",
                read={_INIT: "/source"},
                write={work: "/out"},
            )
    prune("init-????????????????", target)
    return target / "init"


def build_initramfs(kernel: Kernel, init: Path) -> Path:
    target = cache_dir() / f"initramfs-{key(kernel.identity, init.parent.name, *BOOT_MODULES)}"
    if not target.is_file():
        with Stage("initramfs"), fresh(target) as work:
            modules = Modules(kernel)
            order = modules.order(BOOT_MODULES)
            files = [("init", init.read_bytes())]
            files += [(f"modules/{name}.ko", modules.read(name)) for name in order]
            files += [("modules/order", "".join(f"{name}.ko\n" for name in order).encode())]
            work.write_bytes(cpio.archive(["modules"], files))
    prune("initramfs-*", target)
    return target


def build_root_image(build: Path, guest: Path, kernel: Kernel, init: Path) -> Path:
    """The guest's root as an uncompressed read-only image: reading it costs no CPU.

    Its modules are the chosen kernel's.
    """
    made_from = [identity(guest), kernel.identity, init.parent.name, _IMAGE_RECIPE]
    target = cache_dir() / f"root-{key(*made_from)}.erofs"
    if not target.is_file():
        with Stage("root image") as stage:
            for folder in ("opt/vtpu", "opt/model"):
                run_privileged(["mkdir", "-p", str(guest / folder)])
            run_privileged(["install", "-m", "755", str(init), str(guest / "usr/sbin/vtpu-init")])
            run_privileged(["ln", "-sf", "vtpu-init", str(guest / "usr/sbin/shutdown")])
            make_image(
                stage,
                build,
                guest,
                target,
                exclude=r"^(boot|var/cache|var/lib/apt)/.*",
                inside={kernel.modules: "usr/lib/modules"},
            )
    prune("root-*.erofs", target)
    return target


def make_image(
    stage: Stage,
    build: Path,
    folder: Path,
    target: Path,
    *,
    exclude: str = "",
    inside: Mapping[Path, str] | None = None,
) -> None:
    """Packs a folder, with others in place of some in it.

    File times stay: Python checks its bytecode against them.
    """
    log = log_dir() / f"{target.name.split('-')[0]}-image.log"
    # mkfs.erofs does not end on a full disk.
    size = sum(path.lstat().st_size for path in folder.rglob("*")) >> 20
    need_space(target.parent, size + 50, "the image")
    with fresh(target) as work:
        options = ["--quiet", "-x-1", "--all-root"]
        options += [f"--exclude-regex={exclude}"] if exclude else []
        run_in_root(
            stage,
            build,
            ["mkfs.erofs", *options, f"/out/{work.name}", "/source"],
            log,
            read={folder: "/source"}
            | {other: f"/source/{place}" for other, place in (inside or {}).items()},
            write={target.parent: "/out"},
        )
