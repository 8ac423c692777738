# SPDX-License-Identifier: MIT
"""Which Debian mirror to use: the one that this machine already uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .stage import StageError

SUITE = "trixie"
BACKPORTS = f"{SUITE}-backports"
# What a machine's own entry for Debian's main archive may be called.
_SUITES = {"bookworm", "trixie", "forky", "sid", "stable", "testing", "oldstable", "unstable"}
_ONE_LINE = re.compile(
    r"^deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)$"
)


@dataclass(frozen=True)
class Source:
    """One archive of apt's configuration."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]

    @property
    def is_debian_main(self) -> bool:
        return "main" in self.components and not _SUITES.isdisjoint(self.suites)


def parse_one_line(text: str) -> list[Source]:
    """apt's sources.list format."""
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.split("#", 1)[0].strip())
        if match:
            components = tuple(match["components"].split())
            found.append(Source(match["uri"], (match["suite"],), components))
    return found


def parse_deb822(text: str) -> list[Source]:
    """apt's stanza format, *.sources."""
    found = []
    for stanza in re.split(
        r"\n\s*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    ):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields[name] = f"{fields.get(name, '')} {line.strip()}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split():
            continue
        if fields.get("enabled", "yes").lower() in {"no", "false", "0"}:
            continue
        suites = tuple(fields.get("suites", "").split())
        components = tuple(fields.get("components", "").split())
        found += [Source(uri, suites, components) for uri in fields.get("uris", "").split()]
    return found


def configured_mirror(apt: Path = Path("/etc/apt")) -> str | None:
    """The URI of the machine's own Debian archive, if it has one."""
    sources: list[Source] = []
    lists = sorted((apt / "sources.list.d").glob("*"))
    for path in [apt / "sources.list", *lists]:
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".sources":
            sources += parse_deb822(text)
        elif path.suffix == ".list":
            sources += parse_one_line(text)
    for source in sources:
        if source.is_debian_main:
            return source.uri.rstrip("/")
    return None


def proxy_options() -> list[str]:
    """apt's proxy settings, which mmdebstrap does not read from the host."""
    if not shutil.which("apt-config"):
        return []
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False)
    wanted = re.compile(
        r"^(Acquire::https?::(?:Proxy\S*|Verify\S*|CaInfo)) (\".*\");$", re.IGNORECASE
    )
    return [
        f"--aptopt={match[1]} {match[2]};"
        for line in dump.stdout.splitlines()
        if (match := wanted.match(line)) and match[2] != '""'
    ]


def mmdebstrap_sources(with_source: bool, with_backports: bool = False) -> list[str]:
    """The source lines for mmdebstrap; none when it should take its default."""
    mirror = configured_mirror()
    if mirror is None and with_backports:
        raise StageError(f"{BACKPORTS} needs a Debian mirror in /etc/apt")
    if mirror is None:
        # mmdebstrap's own default has no deb-src line; the build root needs one,
        # which root.py then derives from what mmdebstrap wrote.
        return []
    kinds = ["deb", "deb-src"] if with_source else ["deb"]
    suites = [SUITE, BACKPORTS] if with_backports else [SUITE]
    return [f"{kind} {mirror} {suite} main" for kind in kinds for suite in suites]
