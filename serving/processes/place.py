"""Which process of the group this one is: from flags, or from what a launcher sets.

Flags go before LeaderWorkerSet, that before SLURM. A description that is only half there is an
error, never a server of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from k3jax.config import ConfigError

DEFAULT_PORT = 8476  # of the coordinator under LeaderWorkerSet; the control port is the next one
# Ports of a SLURM job depend on its id, so that two jobs on one machine do not meet.
_SLURM_PORTS = 61440
_SLURM_JOBS = 2000
# Set for the processes that `serve.py --processes` starts: "index/count" on this machine.
LOCAL_PROCESS = "K3JAX_LOCAL_PROCESS"

_LWS = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
_SLURM = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFlags:
    """What the command line says; None where it says nothing."""

    coordinator: str | None = None
    num_hosts: int | None = None
    host_id: int | None = None
    control_port: int | None = None
    processes: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process in its group.

    Attributes:
      address: of host 0, without a port.
      coordinator_port: of jax's coordination service; 0 in a group on one machine whose ports are
        not chosen yet.
      control_port: of our own connections to host 0.
      num_hosts, host_id: processes of the group, and which one this is.
      local_index, local_count: which of the processes on this machine this is, and how many.
    """

    address: str = "127.0.0.1"
    coordinator_port: int = 0
    control_port: int = 0
    num_hosts: int = 1
    host_id: int = 0
    local_index: int = 0
    local_count: int = 1

    @property
    def is_alone(self) -> bool:
        return self.num_hosts == 1

    @property
    def coordinator(self) -> str:
        """`host:port` of jax's coordination service."""
        return join_address(self.address, self.coordinator_port)

    def local_devices(self, num_ranks: int) -> tuple[int, ...] | None:
        """Ids of the machine's devices that this process uses; None leaves it all of them."""
        if self.local_count == 1:
            return None
        count = num_ranks // self.num_hosts
        return tuple(range(self.local_index * count, (self.local_index + 1) * count))


def resolve(flags: PlaceFlags, environment: Mapping[str, str]) -> Place:
    """Find out which process of which group this is.

    Args:
      environment: the variables of this process.

    Raises:
      ConfigError: the description is incomplete or contradicts itself.
    """
    place = _from_flags(flags) or _from_lws(flags, environment) or _from_slurm(flags, environment)
    if place is None:
        place = Place(control_port=flags.control_port or 0)
    if not 0 <= place.host_id < place.num_hosts:
        raise ConfigError(
            f"host id is out of range: got {place.host_id}; expected 0..{place.num_hosts - 1}, "
            f"since there are {place.num_hosts} hosts"
        )
    if flags.processes > 1:
        return dataclasses.replace(
            place,
            num_hosts=place.num_hosts * flags.processes,
            host_id=place.host_id * flags.processes,
            local_count=flags.processes,
        )
    index, _, count = environment.get(LOCAL_PROCESS, "0/1").partition("/")
    return dataclasses.replace(place, local_index=int(index), local_count=int(count))


def check_ranks(place: Place, num_ranks: int) -> None:
    """Check that the mesh divides over the processes.

    Raises:
      ConfigError: it does not.
    """
    if num_ranks % place.num_hosts:
        raise ConfigError(
            f"mesh does not divide over the processes: got {num_ranks} devices for "
            f"{place.num_hosts} hosts; expected a multiple of {place.num_hosts}"
        )


def first_host(nodelist: str) -> str:
    """The first host name of a SLURM node list, for example `gpu[003-005,9],x1` -> `gpu003`."""
    name, bracket, rest = nodelist.partition("[")
    if not bracket or "," in name:
        return nodelist.partition(",")[0]
    inside, _, after = rest.partition("]")
    number = inside.partition(",")[0].partition("-")[0]
    return name + number + after.partition(",")[0]


def split_address(text: str, what: str) -> tuple[str, int]:
    """Split `host:port`; an IPv6 address stands in brackets.

    Raises:
      ConfigError: it is something else.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{what} is not understood: got {text!r}; expected HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _from_flags(flags: PlaceFlags) -> Place | None:
    given = {
        "--coordinator": flags.coordinator,
        "--num-hosts": flags.num_hosts,
        "--host-id": flags.host_id,
    }
    if not _is_described(
        {name: str(v) for name, v in given.items() if v is not None}, tuple(given)
    ):
        return None
    assert flags.coordinator is not None
    assert flags.num_hosts is not None
    assert flags.host_id is not None
    address, port = split_address(flags.coordinator, "--coordinator")
    return _place(flags, address, port, flags.num_hosts, flags.host_id)


def _from_lws(flags: PlaceFlags, environment: Mapping[str, str]) -> Place | None:
    if not _is_described(environment, _LWS):
        return None
    size, index = (_number(environment, name) for name in _LWS[1:])
    return _place(flags, environment[_LWS[0]], DEFAULT_PORT, size, index)


def _from_slurm(flags: PlaceFlags, environment: Mapping[str, str]) -> Place | None:
    # Without a node list this is a batch script or a login shell: no step that srun has started.
    if _SLURM[0] not in environment or not _is_described(environment, _SLURM):
        return None
    tasks, task = (_number(environment, name) for name in _SLURM[1:])
    job = _number(environment, "SLURM_JOB_ID") if "SLURM_JOB_ID" in environment else 0
    port = _SLURM_PORTS + 2 * (job % _SLURM_JOBS)
    return _place(flags, first_host(environment[_SLURM[0]]), port, tasks, task)


def _place(flags: PlaceFlags, address: str, port: int, num_hosts: int, host_id: int) -> Place:
    return Place(
        address=address,
        coordinator_port=port,
        control_port=flags.control_port or port + 1,
        num_hosts=num_hosts,
        host_id=host_id,
    )


def _is_described(given: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Whether all of some settings are given; false if none is.

    Raises:
      ConfigError: some are and some are not.
    """
    present = [name for name in names if name in given]
    missing = [name for name in names if name not in given]
    if present and missing:
        got = ", ".join(f"{name}={given[name]}" for name in present)
        raise ConfigError(
            f"group of processes is half described: got {got}; expected also {', '.join(missing)}"
        )
    return not missing


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise ConfigError(f"{name} is not understood: got {text!r}; expected a number")
    return int(text)
