"""Options of a session that belong together: network, rendezvous, checkpoints, monitoring.

Each can be given to `gradlane.init`, and each option by an environment variable, too.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradlane.errors import RefusedError
from gradlane.formats.untrusted import escaped
from gradlane.training.options.endpoint import parse_address
from gradlane.training.options.option_fields import (
    OptionGroup,
    option,
    read_flag,
    read_int,
    read_ports,
)
from gradlane.training.options.secret import check_secret, read_secret_file

if TYPE_CHECKING:
    from gradlane.training.torch_internals import Store

_PROCESSORS_A_LANE = 4
_LANE_RATE_BPS = 10e9
_MOST_LANES = 3
"""Three carried 25 Gbit/s, see `docs/research/cuda.md`."""


@dataclass(frozen=True, repr=False)
class Rendezvous(OptionGroup):
    """Which rank this is, and where the ranks meet; what is absent comes from the launcher."""

    store: Store | str | None = option(
        None,
        "The c10d store in which the ranks meet, or `HOST:PORT` of one that no rank hosts, such as "
        "`gradlane store`; else torch.distributed's if it is initialized, else one at "
        "`MASTER_ADDR:MASTER_PORT`, which rank 0 or its launcher hosts.",
    )
    rank: int | None = option(
        None, "This rank; else the launcher's; 0 without a launcher.", least=0, read=read_int
    )
    world_size: int | None = option(
        None,
        "Number of ranks, those that only serve included; else the launcher's; 1 without one.",
        least=1,
        read=read_int,
    )
    job: str | None = option(
        None, "Name of the job, which ranks of one job share; else the launcher's."
    )
    join: bool = option(
        False,
        "Join a training of the job that runs with `going_on`, in place of starting one with the "
        "other ranks; rank and world size are then those that the members give.",
        read=read_flag,
    )

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ValueError: an option is out of its range, or the store's address cannot be read.
        """
        super().__post_init__()
        if isinstance(self.store, str) and self.store_address is None:
            raise RefusedError(
                f"store is {escaped(self.store)}; it must be HOST:PORT or [IPv6]:PORT of a store "
                "that runs (`gradlane store`), or its PORT on this machine"
            )

    @property
    def store_address(self) -> tuple[str, int] | None:
        """Host and port of a store that is given by its address."""
        if isinstance(self.store, str):
            with contextlib.suppress(ValueError):
                host, port = parse_address(self.store, "store")
                return (host, port) if port else None
        return None


@dataclass(frozen=True, repr=False)
class Network(OptionGroup):
    """How ranks reach each other, how long they wait, and how bytes are sent."""

    interface: str | None = option(
        None, "Network interface to listen on; else the one that leads to the store."
    )
    advertise: str | None = option(
        None, "Address or name that other ranks reach this one at, where it is another."
    )
    ports: tuple[int, int] | None = option(
        None, "Lowest and highest port to listen on; any if absent.", read=read_ports
    )
    secret: str | None = option(
        None,
        "The secret of the job, of 128 bits or more, the same on every rank; else the content of "
        "`secret_file`; else rank 0 draws one and leaves it in the store. See `docs/security.md`.",
        shown=False,
        refuses_empty=True,
    )
    secret_file: str | Path | None = option(
        None,
        "File that holds the secret and that its owner alone can read; `gradlane secret new` "
        "writes one.",
        read=Path,
        refuses_empty=True,
    )
    silence_timeout_s: float = option(
        30.0, "A rank that sends nothing for this long is lost.", unit="s", above=0, agreed=True
    )
    progress_timeout_s: float = option(
        1800.0,
        "Longest wait for ranks that are alive but take no part, also before they are connected.",
        unit="s",
        above=0,
        agreed=True,
    )
    connect_timeout_s: float = option(
        300.0,
        "Longest wait for ranks to appear; each rank waits as long as its own says.",
        unit="s",
        above=0,
    )
    frame_bytes: int = option(
        65_096,
        "Payload of a frame. Connections so fast that it takes 3 ms at most use up to three times "
        "as much; a rest of up to an eighth goes with the last frame of a slice.",
        unit="bytes",
        least=1,
        agreed=True,
    )
    low_water_bytes: int = option(
        65_536,
        "Bytes that may wait unsent in the kernel, a peer; more on fast connections where "
        "`send_buffer_bytes` is 0.",
        unit="bytes",
        least=1,
    )
    send_buffer_bytes: int = option(
        0,
        "The kernel's send buffer, a peer; 0: fitted to the path while sending. A fixed one must "
        "cover bandwidth times delay.",
        unit="bytes",
        least=0,
    )
    pacing: bool = option(
        True,
        "Hold each connection to its part of the rate that this rank's port has carried, so that "
        "no queue of the network overflows.",
    )
    seal: bool = option(
        True,
        "Encrypt and authenticate all that ranks send each other, where the user has given a "
        "secret; False: the secret is proved when they connect, and then bytes go in the clear.",
        agreed=True,
    )
    work_threads: int | None = option(
        None,
        "Threads that add gradients up; 0: the threads of the lanes do. If absent, one a lane.",
        least=0,
        read=read_int,
    )
    lanes: int | None = option(
        None,
        "Connections to each other rank, each with a thread of its own and its share of all "
        "slices. One carries some 10 Gbit/s in each direction. If absent, one for four processors "
        "that this rank has and for 10 Gbit/s of its port, whichever are fewer, at most 3: "
        "processors are shared evenly by the ranks of a node. The rank with the fewest decides "
        "for all.",
        least=1,
        most=16,
        read=read_int,
    )

    def __post_init__(self) -> None:
        """Check every option, and the range of ports.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        super().__post_init__()
        if self.ports is not None:
            low, high = self.ports
            if not 1 <= low <= high <= 65535:
                raise RefusedError(f"ports is {self.ports}; it must be (low, high) in 1 to 65535")

    def thread_counts(self, processors: int, port_rate_bps: float | None = None) -> tuple[int, int]:
        """Return `work_threads` and `lanes` of a rank.

        Args:
            processors: those that the rank has for itself.
            port_rate_bps: rate of its port; None: unknown.
        """
        lanes = self.lanes
        if lanes is None:
            lanes = min(_MOST_LANES, max(1, processors // _PROCESSORS_A_LANE))
            if port_rate_bps is not None:
                lanes = min(lanes, max(1, math.ceil(port_rate_bps / _LANE_RATE_BPS)))
        return lanes if self.work_threads is None else self.work_threads, lanes

    def read_secret(self) -> str | None:
        """Return the secret that is given or stands in `secret_file`; None for neither.

        Raises:
            ValueError: both are given, the secret is empty or short, or the file cannot be read or
                can be read by others.
        """
        if self.secret is not None and self.secret_file is not None:
            raise RefusedError(
                f"there are two secrets: secret (or GRADLANE_SECRET), and secret_file (or "
                f"GRADLANE_SECRET_FILE) {self.secret_file}; give one of them"
            )
        if self.secret is not None:
            return check_secret(self.secret.strip(), "the secret of secret= or GRADLANE_SECRET")
        return None if self.secret_file is None else read_secret_file(Path(self.secret_file))


@dataclass(frozen=True, repr=False)
class Checkpoints(OptionGroup):
    """Where and when the ranks write checkpoints; see `docs/checkpoints.md`."""

    folder: str | Path | None = option(
        None,
        "Folder to write checkpoints to, shared by all ranks; none are written if absent.",
        name="checkpoint_folder",
        read=Path,
    )
    every: int = option(
        1000,
        "Training steps from one checkpoint to the next.",
        name="checkpoint_every",
        unit="steps",
        least=1,
        agreed=True,
    )
    keep: int = option(
        3,
        "Complete checkpoints that stay; older ones are removed.",
        name="checkpoint_keep",
        least=1,
        agreed=True,
    )

    def __post_init__(self) -> None:
        """Check every option, and write the folder as a path.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        super().__post_init__()
        _as_path(self, "folder")

    def options_without_a_folder(self) -> str:
        """Return why no checkpoint would be written though one is asked for; empty if none is.

        The folder may come from the environment.
        """
        given = [
            f"{name}={getattr(self, name)}"
            for name in ("every", "keep")
            if getattr(self, name) != getattr(type(self), name)
        ]
        if self.folder is not None or not given:
            return ""
        return (
            f"checkpoints has {', '.join(given)} and no folder, so that none would be written: "
            "give gradlane.Checkpoints(folder, ...) or set GRADLANE_CHECKPOINT_FOLDER, or leave "
            "these options and their variables out"
        )


@dataclass(frozen=True, repr=False)
class Monitoring(OptionGroup):
    """Reports of a session, while it runs and when it ends; see `docs/observability.md`."""

    prometheus: int | str | None = option(
        None,
        "Port of the loopback interface at which this rank answers Prometheus, plus its local "
        "rank; 0: any; or `HOST:PORT`; no endpoint if absent.",
    )
    dashboard: int | str | None = option(
        None,
        "Port of the loopback interface at which rank 0 serves a live page, which `gradlane watch` "
        "reads, too; 0: any; or `HOST:PORT`; no page if absent.",
    )
    dashboard_everywhere: bool = option(
        False, "Every rank serves a live page, at the port of `dashboard` plus its local rank."
    )
    trace: str | Path | None = option(
        None,
        "File of a timeline, written when the session ends: each rank writes its own, "
        "`trace.rank0.json` for `trace.json`; see `docs/timelines.md`.",
        read=Path,
    )
    frame_trace: bool = option(False, "Keep the frames for `session.monitoring.take_trace`.")
    summary: bool = option(
        True, "Rank 0 prints a line to stderr at the end on the reasons that steps have waited."
    )

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ValueError: an address cannot be read, or the timeline's folder does not exist.
        """
        super().__post_init__()
        for name in ("prometheus", "dashboard"):
            address = getattr(self, name)
            if isinstance(address, str):
                parse_address(address, name)
            elif address is not None and not 0 <= address <= 65535:
                raise RefusedError(f"{name} is {address}; it must be 0 to 65535")
        _as_path(self, "trace")
        if self.trace is not None and not Path(self.trace).absolute().parent.is_dir():
            raise RefusedError(f"trace is {self.trace}, whose folder does not exist")


def _as_path(group: Any, name: str) -> None:
    """Keep a path that is given as a text as a path."""
    value = getattr(group, name)
    if value is not None:
        object.__setattr__(group, name, Path(value))


ENVIRONMENT_GROUPS: tuple[type[OptionGroup], ...] = (Rendezvous, Network, Checkpoints, Monitoring)
"""The objects whose options environment variables give, too."""
