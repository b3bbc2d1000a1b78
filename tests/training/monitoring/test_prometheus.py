"""The text format, and the endpoint that answers with it."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from gradlane.training.monitoring.endpoint import Endpoint, wanted_address
from gradlane.training.monitoring.metrics import Metrics, metrics_of
from gradlane.training.monitoring.prometheus import (
    CONTENT_TYPE,
    exposition,
    serve,
)
from gradlane.training.options.endpoint import parse_address
from gradlane.training.options.option_fields import with_environment
from gradlane.training.options.option_groups import Monitoring
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.membership import Membership
from tests.training.monitoring.test_metrics import NO_STEPS, reading, wait

SAMPLE = re.compile(
    r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)'
)
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"')


def parsed(page: str) -> tuple[dict[str, str], dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """Read a page as the format's rules have it: kinds by name, values by name and labels."""
    kinds: dict[str, str] = {}
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds, f"{name} comes twice"
            kinds[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels = match[1], frozenset(LABEL.findall(match[2]))
        assert name in kinds, f"{name} before its type"
        assert (name, labels) not in values, line
        values[(name, labels)] = float(match[3])
    return kinds, values


def metrics() -> Metrics:
    odd = wait('a "strange"\\one\n.weight', 1, 0.25, 0.25, 1)
    return metrics_of(0, 2, NO_STEPS, [reading(), reading(waits=[odd])])


def test_a_page_follows_the_rules_and_has_the_numbers() -> None:
    kinds, values = parsed(exposition(Complete.metrics()))
    assert all(name.startswith("gradlane_") for name in kinds)
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter"), name
    rank = ("rank", "0")
    assert values[("gradlane_sent_bytes_total", frozenset({rank, ("peer", "1")}))] == 200.0
    assert ("gradlane_sent_bytes_total", frozenset({rank, ("peer", "0")})) not in values
    assert values[("gradlane_last_contributions_total", frozenset({rank, ("from", "1")}))] == 12.0
    layer = ("layer", r"a \"strange\"\\one\n")
    labels = frozenset({rank, ("model", "2"), layer})
    assert values[("gradlane_layer_wait_seconds_total", labels)] == 0.25


def test_what_lost_ranks_have_held_back_is_counted() -> None:
    membership = Membership(RankInfo(0, 4, "job", 0))
    membership.note(1, (0, 2, 3), 4, "rank 1 is gone")
    membership.note(2, (0, 2), 9, "rank 3 is gone")
    found = metrics_of(0, 4, NO_STEPS, [], membership, residuals=5)
    assert [(row["rank"], row["residuals"]) for row in found["lost"]] == [(1, 5), (3, 5)]
    _, values = parsed(exposition(found))
    assert values[("gradlane_lost_residuals_total", frozenset({("rank", "0")}))] == 10.0


class Complete:
    """Metrics whose peers have all counters."""

    @staticmethod
    def metrics() -> Metrics:
        found = metrics()
        for row in found["peers"]:
            for name in ("rx_bytes", "tx_payload_bytes", "rx_payload_bytes", "queued_messages"):
                row.setdefault(name, 0)  # type: ignore[misc]
        return found


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    one = serve("127.0.0.1", 0, Complete.metrics)
    yield one
    one.close()


def test_the_endpoint_answers(endpoint: Endpoint) -> None:
    address = f"http://127.0.0.1:{endpoint.port}"
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        parsed(answer.read().decode())
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/other", timeout=10)


def test_counters_of_petabytes_are_numbers_still() -> None:
    found = Complete.metrics()
    found["peers"][1]["tx_bytes"] = (1 << 63) + 1
    _, values = parsed(exposition(found))
    key = ("gradlane_sent_bytes_total", frozenset({("rank", "0"), ("peer", "1")}))
    assert values[key] == 2.0**63


def test_a_port_that_is_taken_is_named(endpoint: Endpoint) -> None:
    with pytest.raises(
        ValueError, match=rf"127\.0\.0\.1', port {endpoint.port}.*Monitoring\(prometheus="
    ):
        serve("127.0.0.1", endpoint.port, Complete.metrics)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 65536), ("no.such.host.invalid", 0), ("a" * 70, 0), ("\0", 0)]
)
def test_an_address_that_cannot_be_had_is_named(host: str, port: int) -> None:
    with pytest.raises(ValueError, match=rf"port {port} .*Monitoring\(prometheus="):
        serve(host, port, Complete.metrics)


@pytest.mark.parametrize(
    ("port", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"GRADLANE_PROMETHEUS": ""}, None),
        (9400, {}, ("127.0.0.1", 9400)),
        (9400, {"LOCAL_RANK": "3", "GRADLANE_PROMETHEUS": "1"}, ("127.0.0.1", 9403)),
        (0, {"LOCAL_RANK": "3"}, ("127.0.0.1", 0)),
        ("9400", {"LOCAL_RANK": "1"}, ("127.0.0.1", 9401)),
        ("0.0.0.0:9400", {"LOCAL_RANK": "1"}, ("0.0.0.0", 9401)),
        (None, {"GRADLANE_PROMETHEUS": "9100", "SLURM_LOCALID": "1"}, ("127.0.0.1", 9101)),
        (None, {"GRADLANE_PROMETHEUS": "10.0.0.1:9100"}, ("10.0.0.1", 9100)),
        (None, {"GRADLANE_PROMETHEUS": "localhost:0", "LOCAL_RANK": "2"}, ("localhost", 0)),
        (None, {"GRADLANE_PROMETHEUS": "[::1]:9100"}, ("::1", 9100)),
        (None, {"GRADLANE_PROMETHEUS": "[::]:9100"}, ("::", 9100)),
    ],
)
def test_ranks_of_a_node_take_ports_from_the_one_given_on(
    port: int | str | None, environment: dict[str, str], expected: tuple[str, int] | None
) -> None:
    given = Monitoring() if port is None else Monitoring(prometheus=port)
    wanted = with_environment(given, environment).prometheus
    assert wanted_address(wanted, environment, "prometheus") == expected


@pytest.mark.parametrize(
    "text",
    [
        *("yes", "host:", ":9400", "host:70000", "70000", "1.2.3.4:port", "-1", "+1", "1e3"),
        *("::1:9400", "[::1]", "[]:9400", "[[::1]]:9400", "a b:1", "9400\n", "\u0662", "\u00b2"),
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    """`:9400` is every address to some and this machine to others, so it is neither."""
    with pytest.raises(ValueError, match=r"prometheus is .*PORT.*HOST:PORT.*\[IPv6\]:PORT"):
        parse_address(text, "prometheus")


def test_an_address_that_is_refused_is_named_without_its_control_characters() -> None:
    with pytest.raises(ValueError, match=r"^GRADLANE_PROMETHEUS is \\x1b\[2J; it") as caught:
        with_environment(Monitoring(), {"GRADLANE_PROMETHEUS": "\x1b[2J"})
    assert str(caught.value).isprintable()


def test_a_port_is_one_of_this_machine_unless_said_otherwise() -> None:
    """What `prometheus=0` opens is loopback's, and `0.0.0.0` has to be written down."""
    wanted = wanted_address(0, {}, "prometheus")
    assert wanted is not None
    one = serve(*wanted, Complete.metrics)
    try:
        assert one.address[0] == "127.0.0.1"
    finally:
        one.close()
