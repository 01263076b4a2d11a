"""What all processes of a group must have in common, and the words for where they differ."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path

from serving.processes.messages import pack_json, unpack_json

# What host 0 is told, and every other process.
Facts = dict[str, str]

_PACKAGES = ("k3jax", "jax", "jaxlib", "numpy")
_MODEL_FILES = ("config.json", "model.safetensors.index.json", "converted.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a host.

    Attributes:
      num_hosts: of its group, as it was told.
      facts: what must agree.
    """

    host_id: int
    num_hosts: int
    facts: Facts

    def pack(self) -> bytes:
        """As the body of a message."""
        return pack_json(dataclasses.asdict(self))

    @staticmethod
    def unpack(body: bytes) -> Hello:
        """The inverse of `pack`."""
        return Hello(**unpack_json(body))


def gather_facts(options: Mapping[str, object], folder: Path) -> Facts:
    """What must agree: versions, options, and the files that describe the model.

    Args:
      options: those that decide which programs run and on what.
      folder: of the model.
    """
    facts = {"python": ".".join(platform.python_version_tuple()[:2])}
    facts |= {name: _version(name) for name in _PACKAGES}
    facts |= {f"--{name.replace('_', '-')}": str(value) for name, value in options.items()}
    for name in _MODEL_FILES:
        file = folder / name
        if file.is_file():
            facts[name] = f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
        else:
            facts[name] = "not there"
    return facts


def find_differences(own: Hello, others: Collection[Hello]) -> list[str]:
    """One sentence for each thing in which a host differs from host 0."""
    problems: list[str] = []
    for other in sorted(others, key=lambda hello: hello.host_id):
        host = f"host {other.host_id}"
        if other.num_hosts != own.num_hosts:
            problems.append(
                f"number of hosts differs: got {other.num_hosts} from {host}; expected "
                f"{own.num_hosts}, as host 0 has"
            )
        names = [*own.facts, *(name for name in other.facts if name not in own.facts)]
        problems += [
            f"{name} differs: got {other.facts.get(name, 'nothing')} from {host}; expected "
            f"{own.facts.get(name, 'nothing')}, as host 0 has"
            for name in names
            if other.facts.get(name) != own.facts.get(name)
        ]
    return problems


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
