"""Completion scripts for bash, zsh and fish, made from the parser so that they can't lag behind."""

from __future__ import annotations

import argparse


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    verbs = _verbs(parser)
    options = {name: _options(verb) for name, verb in verbs.items()}
    if shell == "fish":
        return _fish(verbs, options)
    body = _bash(options)
    if shell == "zsh":
        # zsh runs bash's completion functions; only the start differs.
        return f"#compdef gpusupctl\nautoload -Uz bashcompinit && bashcompinit\n{body}"
    return body


def _verbs(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise ValueError("the parser has no verbs")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(
        word for action in parser._actions for word in action.option_strings if word[:2] == "--"
    )


def _bash(options: dict[str, list[str]]) -> str:
    cases = "\n".join(f'        {name}) words="{" ".join(o)}" ;;' for name, o in options.items())
    return f"""_gpusupctl() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" verb="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$word" in -*) ;; *) verb="$word"; break ;; esac
    done
    case "$verb" in
        "") words="{" ".join(options)}" ;;
{cases}
    esac
    if [[ -n "$verb" && "$cur" != -* ]]; then
        words="$(gpusupctl status -o json 2>/dev/null | {_NAMES})"
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -F _gpusupctl gpusupctl"""


#: Names of slots, devices, models and proxies out of the JSON, without any tool but grep.
_NAMES = r"""grep -oE '"(slot|device|model|name)": "[^"]+"' | cut -d'"' -f4 | sort -u"""


def _fish(verbs: dict[str, argparse.ArgumentParser], options: dict[str, list[str]]) -> str:
    lines = ["complete -c gpusupctl -f"]
    for name, parser in verbs.items():
        about = (parser.description or "").replace("'", "\\'")
        lines.append(f"complete -c gpusupctl -n __fish_use_subcommand -a {name} -d '{about}'")
        lines += [
            f"complete -c gpusupctl -n '__fish_seen_subcommand_from {name}' -l {option[2:]}"
            for option in options[name]
        ]
    lines.append(
        "complete -c gpusupctl -n 'not __fish_use_subcommand' "
        f'-a "(gpusupctl status -o json 2>/dev/null | {_NAMES})"'
    )
    return "\n".join(lines)
