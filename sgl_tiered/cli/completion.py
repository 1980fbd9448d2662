"""``sgl-tiered completion``: what a shell needs to complete subcommands and flags.

The script is made of the parsers themselves, so it knows what they know; it is printed
once and asks nobody afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["SHELLS", "register", "script"]

_PROGRAM = "sgl-tiered"


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes subcommands, flags and choices in a shell",
        description="Prints the script; a shell reads it at its start.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  bash: echo 'source <(sgl-tiered completion bash)' >>~/.bashrc\n"
        "  zsh:  echo 'source <(sgl-tiered completion zsh)' >>~/.zshrc\n"
        "  fish: sgl-tiered completion fish \\\n"
        "            >~/.config/fish/completions/sgl-tiered.fish",
    )
    parser.add_argument("shell", choices=tuple(SHELLS))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script; returns the exit code."""
    print(script(arguments.shell, arguments.of_all))
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script for one of ``SHELLS``."""
    return "\n".join(SHELLS[shell](parser))


def _bash(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "_sgl_tiered() {"
    yield '  local words="" path="" word'
    yield '  local current="${COMP_WORDS[COMP_CWORD]}"'
    yield '  local before="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
    yield '    case "$path/$word" in'
    for path, _ in _parsers(parser):
        if path:
            yield f'      {path}) path="{path}" ;;'
    yield "    esac"
    yield "  done"
    yield '  case "$path $before" in'
    for path, each in _parsers(parser):
        for action in each._actions:
            choices = _choices(action)
            for flag in action.option_strings if choices else ():
                yield f'    "{path} {flag}") words="{" ".join(choices)}" ;;'
    yield '    *) case "$path" in'
    for path, each in _parsers(parser):
        yield f'      "{path}") words="{" ".join(_words(each))}" ;;'
    yield "    esac ;;"
    yield "  esac"
    yield '  COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield f"complete -o default -F _sgl_tiered {_PROGRAM}"


def _zsh(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield "autoload -U +X compinit && compinit"
    yield "autoload -U +X bashcompinit && bashcompinit"
    yield from _bash(parser)


def _fish(parser: argparse.ArgumentParser) -> Iterator[str]:
    for path, each in _parsers(parser):
        names = path.split("/")[1:]
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in names)
        here = f"complete -c {_PROGRAM} -n {_quoted(seen or '__fish_use_subcommand')}"
        for action in each._actions:
            text = _quoted((action.help or "").replace("%%", "%").split(";")[0])
            choices = _quoted(" ".join(_choices(action)))
            for flag in action.option_strings:
                kind = "-l" if flag.startswith("--") else "-s"
                takes = "" if action.nargs == 0 else " -r"
                known = f" -f -a {choices}" if _choices(action) else ""
                yield f"{here} {kind} {flag.lstrip('-')} -d {text}{takes}{known}"
            if not action.option_strings and _choices(action):
                yield f"{here} -f -a {choices}"


SHELLS: dict[str, Callable[[argparse.ArgumentParser], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}


def _parsers(
    parser: argparse.ArgumentParser, path: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a parser and those below it, with their words behind slashes."""
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _parsers(below, f"{path}/{name}")


def _words(parser: argparse.ArgumentParser) -> list[str]:
    words: list[str] = []
    for action in parser._actions:
        words += action.option_strings or _choices(action)
    return words


def _choices(action: argparse.Action) -> list[str]:
    """Return what may be given; a metavar in braces is a choice that we check."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    metavar = action.metavar
    if isinstance(metavar, str) and metavar.startswith("{"):
        return metavar.strip("{}").split(",")
    return []


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
