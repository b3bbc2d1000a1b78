"""Checks of command lines against the programs that they name, without running them."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from gradlane.cli.main import all_commands
from tests.paths import ROOT

_SEPARATORS = re.compile(r"\s(?:&&|;|\|\||\|)\s")
_REDIRECTION = re.compile(r"\s\d?[<>]\s*\S+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]+=\S*$")
_OMITTED = {"...", "…"}
PYTHON = re.compile(r"(?:\S*/)?python3?$")


def refusal_of(line: str) -> str | None:
    """Return what is wrong with a command line, or None."""
    for command in _SEPARATORS.split(_REDIRECTION.sub("", line)):
        words = [word for word in shlex.split(command, comments=True) if word not in _OMITTED]
        while words and (words[0] == "sudo" or _ASSIGNMENT.match(words[0])):
            words.pop(0)
        if words and (found := _refusal(words)):
            return found
    return None


def _refusal(words: list[str]) -> str | None:
    program = "python" if PYTHON.match(words[0]) else Path(words[0]).name
    if program not in _CHECKS:
        return f"{program} is not known to this test"
    return _CHECKS[program](words[1:])


@functools.cache
def _commands() -> Any:
    """Return all commands: making them takes 0.1 s, and pages name hundreds."""
    return all_commands()


def _gradlane(words: list[str]) -> str | None:
    """Return what is wrong with a command; what is left out in prose is not."""
    command = _commands()
    context = command.context_class(command, info_name="gradlane")
    words = list(words)
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(context, name)
        if name.isupper():
            return None
        if found is None:
            return f"{context.info_name} has no command {name!r}"
        command = found
        context = command.context_class(command, info_name=name, parent=context)
    known = {"--help"}.union(*(one.opts + one.secondary_opts for one in command.params))
    passes_on = command.context_settings.get("ignore_unknown_options", False)
    passes_on |= not command.context_settings.get("allow_interspersed_args", True)
    for word in () if passes_on else words:
        if word.startswith("--") and word.partition("=")[0] not in known:
            return f"{context.info_name} has no option {word}"
    if isinstance(command, TyperGroup) or "--help" in words:
        return None
    try:
        command.make_context(context.info_name, list(words), parent=context.parent)
    except Exception as error:
        # Typer has its own copy of click from some version on.
        kind = type(error).__name__
        if kind == "MissingParameter" or kind == "Exit":
            return None
        text = str(error.format_message()) if hasattr(error, "format_message") else repr(error)
        # A file of the reader's, or a word in capitals in place of a number.
        is_placeholder = any(re.fullmatch(r"[A-Z_]+", word) for word in words)
        return None if "does not exist" in text or is_placeholder else text
    return None


def _python(words: list[str]) -> str | None:
    """Check `python -m MODULE …` and `python FILE …`; files of the reader's are not here."""
    if words == ["-m"]:
        return None
    if words[:1] == ["-m"]:
        module, arguments = words[1], words[2:]
        if module == "gradlane":
            return _gradlane(arguments)
        if module in ("pytest", "venv"):
            return None
        path = module.replace(".", "/")
        known = [
            ROOT / top / f"{path}{end}" for top in ("python", "papers", ".") for end in (".py", "")
        ]
        sources = [path for path in known if path.exists()]
        if not sources:
            return f"there is no module {module}"
        return _options(sources[0], module, arguments)
    if words[:1] == ["-c"]:
        compile(words[1], "a page", "exec")
        return None
    return _script(words)


def _script(words: list[str]) -> str | None:
    """Check a script and its options, where the script is one of this repository."""
    if "/" not in words[0]:
        return None
    path = ROOT / words[0]
    if not path.is_file():
        return f"there is no {words[0]}"
    return _options(path, words[0], words[1:])


def _options(source: Path, name: str, arguments: list[str]) -> str | None:
    """Check that a program's sources, and what examples share, name each option."""
    files = [source] if source.is_file() else sorted(source.rglob("*.py"))
    if source.is_relative_to(ROOT / "examples"):
        files.append(ROOT / "examples" / "common.py")
    texts = [path.read_text(encoding="utf-8") for path in files]
    for word in arguments:
        option = word.strip("[]").partition("=")[0]
        if option.startswith("--") and not any(f'"{option}"' in text for text in texts):
            return f"{name} has no option {option}"
    return None


def _torchrun(words: list[str]) -> str | None:
    from torch.distributed.run import get_args_parser

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed = get_args_parser().parse_args(words)
    except SystemExit:
        return errors.getvalue().splitlines()[-1]
    arguments = [parsed.training_script, *parsed.training_script_args]
    return _python(["-m", *arguments]) if parsed.module else _python(arguments)


def _make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set((re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE) or [""])[1].split())
    for word in words:
        name, is_variable, _ = word.partition("=")
        if is_variable and not re.search(rf"\$\({name}\)", text):
            return f"the Makefile reads no {name}"
        if not is_variable and name not in targets:
            return f"the Makefile has no target {name}"
    return None


def _pip(words: list[str]) -> str | None:
    if words[:1] != ["install"]:
        return f"pip {words[0]} is not known to this test"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)
    assert extras is not None
    for word in words[1:]:
        if match := re.search(r"\[([\w,]+)\]$", word):
            for extra in match[1].split(","):
                if not re.search(rf"^{extra} = \[", extras[1], re.MULTILINE):
                    return f"there is no extra {extra}"
    return None


def _cargo(words: list[str]) -> str | None:
    """Check packages, tests and fuzz targets by their places."""
    for option, value in pairwise(words):
        if option == "-p" and not (ROOT / "crates" / value).is_dir():
            return f"there is no package {value}"
        tests = [f"*/tests/{value}.rs", f"*/tests/{value}/main.rs"]
        if option == "--test" and not any(list((ROOT / "crates").glob(one)) for one in tests):
            return f"there is no test {value}"
        targets = list((ROOT / "fuzz").rglob(f"{value}.rs"))
        if option == "run" and "fuzz" in words and not targets:
            return f"there is no fuzz target {value}"
    return None


def _elsewhere(words: list[str]) -> str | None:
    """Take any words: what they name is on the reader's machines."""
    return None


_OF_THE_SYSTEM = (
    *(
        "apt-get",
        "cat",
        "cd",
        "chmod",
        "export",
        "git",
        "iptables",
        "mpirun",
        "ping",
        "rm",
        "rustup",
    ),
    *("kubectl", "salloc", "sbatch", "scp", "sed", "srun", "ssh", "umask", "wg", "wg-quick"),
)
_CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    "cargo": _cargo,
    "gradlane": _gradlane,
    "make": _make,
    "pip": _pip,
    "python": _python,
    "torchrun": _torchrun,
    **dict.fromkeys(_OF_THE_SYSTEM, _elsewhere),
}
