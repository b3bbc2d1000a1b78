"""The command `gradlane store`: the rendezvous store of a job, in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from typing import Annotated

import typer

from gradlane.training.options.endpoint import LOOPBACK

DEFAULT_PORT = 29600
"""Another one than torchrun's 29500 and 29400, which are taken where its agents run."""


def store(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 or ::, all of this machine.")
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any, which is printed.")
    ] = DEFAULT_PORT,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where it listens as one line of JSON.")
    ] = False,
) -> None:
    """Host a rendezvous store that outlives every rank, rank 0 included.

    Every rank is started with GRADLANE_STORE=HOST:PORT, as printed. Any number of jobs and starts
    may use one store, jobs at the same time under names of their own (GRADLANE_JOB). It runs until
    Ctrl-C or SIGTERM, with status 0. The store has no password; ranks with a secret sign what they
    write and refuse what others wrote.
    """
    ends = {signal.SIGINT, signal.SIGTERM}
    # The store's threads must not take the signals, and one that comes early must not be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        # Each connection is an open file.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        from gradlane.training.rendezvous.store_server import bind_store

        _serve(host, bind_store(host, port), ends, as_json)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(host: str, bound: socket.socket, ends: set[signal.Signals], as_json: bool) -> None:
    """Host a store at a bound socket, and say where, until one of the signals comes."""
    from gradlane.training.rendezvous import addresses
    from gradlane.training.rendezvous.store_server import host_store
    from gradlane.training.rendezvous.torch_reports import hidden_reports

    # Also those of requests that are none, which any process that reaches the port can send.
    with hidden_reports():
        hosted = host_store(bound)
        is_everywhere = host in ("0.0.0.0", "::")
        reached = socket.gethostname() if is_everywhere else host
        at = addresses.endpoint(reached, hosted.port)
        if as_json:
            place = {"host": host, "port": hosted.port, "pid": os.getpid()}
            typer.echo(json.dumps({**place, "environment": {"GRADLANE_STORE": at}}))
        else:
            alone = ", for ranks on this machine alone" if addresses.names_loopback(host) else ""
            where = addresses.endpoint(host, hosted.port)
            typer.echo(f"the rendezvous store is ready at {where}{alone}")
            typer.echo(f"set it for every rank: export GRADLANE_STORE={at}")
        signal.sigwait(ends)
        if not getattr(hosted, "libuvBackend", False):
            # Its end would wait for the rest of every request that has begun.
            os._exit(0)
        del hosted
