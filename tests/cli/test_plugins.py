"""Commands of other distributions: added, missing, broken and in each other's way."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from gradlane.cli.main import app
from gradlane.cli.plugins import GROUP, PAPERS_COMMANDS, Plugin, Plugins, preset_of
from gradlane.formats.reported_error import ReportedError


def hello() -> None:
    """Say so."""
    typer.echo("hello")


def groups() -> dict[str, typer.Typer]:
    """Return a command line with the command `run` and the group `lab`, which has `run`, too."""
    top, lab = typer.Typer(), typer.Typer()
    top.command("run")(hello)
    lab.command("run")(hello)
    top.add_typer(lab, name="lab")
    return {"": top, "lab": lab}


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> EntryPoint:
    """Return an entry point of the module `plugged`; tests say what its `PLUGIN` is."""
    monkeypatch.setitem(sys.modules, "plugged", ModuleType("plugged"))
    return EntryPoint("one", "plugged:PLUGIN", GROUP)


def give(plugin: object) -> None:
    vars(sys.modules["plugged"])["PLUGIN"] = plugin


def test_commands_and_pages_of_a_plugin_are_added(entry: EntryPoint, tmp_path: Path) -> None:
    give(Plugin({"hello": hello, "lab hello": hello}, {"own": lambda rows, path: f"{rows} {path}"}))
    found = groups()
    plugins = Plugins(found, [entry])
    for line in (["hello"], ["lab", "hello"]):
        assert CliRunner().invoke(found[""], line).stdout == "hello\n"
    assert "Commands of plugged:PLUGIN" in CliRunner().invoke(found[""], ["--help"]).stdout
    assert plugins.page_writer("own")([1], tmp_path) == f"[1] {tmp_path}"


@pytest.mark.parametrize(
    ("plugin", "word"),
    [
        (None, "AttributeError"),
        ({"hello": hello}, "it is a dict in place of a Plugin"),
        (Plugin({"hello": hello, "run": hello}), "command 'run' is there already, of gradlane"),
        (Plugin({"lab run": hello}), "command 'lab run' is there already, of gradlane"),
        (Plugin({"lab": hello}), "command 'lab' is there already, of gradlane"),
        (Plugin({"shed run": hello}), "command 'shed run': there is no group 'shed'"),
    ],
)
def test_a_plugin_that_does_not_load_is_named_and_the_other_commands_stay(
    plugin: object, word: str, entry: EntryPoint, capsys: pytest.CaptureFixture[str]
) -> None:
    if plugin is not None:
        give(plugin)
    found = groups()
    Plugins(found, [entry])
    said = capsys.readouterr().err
    assert (
        said.startswith("gradlane: the commands of plugged:PLUGIN are left out:") and word in said
    )
    assert said.count("\n") == 1
    assert CliRunner().invoke(found[""], ["run"]).stdout == "hello\n"
    # Nothing of it is left behind.
    assert CliRunner().invoke(found[""], ["hello"]).exit_code == 2


def test_two_plugins_with_one_command_are_told_apart(
    entry: EntryPoint, capsys: pytest.CaptureFixture[str]
) -> None:
    give(Plugin({"hello": hello}))
    found = groups()
    Plugins(found, [entry, EntryPoint("two", "plugged:PLUGIN", GROUP)])
    assert "'hello' is there already, of plugged:PLUGIN" in capsys.readouterr().err
    assert CliRunner().invoke(found[""], ["hello"]).stdout == "hello\n"


@pytest.mark.parametrize("rest", [[], ["--help"], ["p3:fig4", "--quick", "3"]])
@pytest.mark.parametrize("name", PAPERS_COMMANDS)
def test_a_command_of_the_papers_that_is_missing_says_what_to_install(
    name: str, rest: list[str]
) -> None:
    found = groups()
    Plugins(found, [])
    failure = CliRunner().invoke(found[""], [*name.split(), *rest]).exception
    assert isinstance(failure, ReportedError)
    assert f"`gradlane {name}`" in str(failure) and "pip install gradlane-papers" in str(failure)
    assert "reproduce" not in CliRunner().invoke(found[""], ["--help"]).stdout


def test_a_page_of_the_papers_that_is_missing_says_what_to_install() -> None:
    plugins = Plugins(groups(), [])
    with pytest.raises(ReportedError, match=r"'slices' .*`pip install gradlane-papers`"):
        plugins.page_writer("slices")
    assert preset_of(json.loads('[{"preset": "slices"}]')) == "slices"
    others: list[object] = [[], {}, [1], [{}], [{"preset": None}], "slices", None]
    for content in others:
        assert preset_of(content) == ""


def test_the_papers_are_installed_here_and_add_what_they_are_known_by() -> None:
    (papers,) = [one for one in entry_points(group=GROUP) if one.name == "papers"]
    assert sorted(papers.load().commands) == sorted(PAPERS_COMMANDS)
    assert "--profiles" in CliRunner().invoke(app, ["reproduce", "--help"]).stdout
