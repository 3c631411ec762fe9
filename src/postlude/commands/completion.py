"""`postlude completion SHELL`: prints the script that completes commands, options, config keys and their values.

The script calls `postlude completion SHELL --line LINE` at each Tab. That prints a candidate a line, with a tab and a
summary, and last a line that says whether files complete the word too. Nothing is imported that takes long.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from postlude.commands.arguments import LAUNCH, MODEL_COMMANDS, OTHER_COMMANDS, add_recipe
from postlude.hf.builtin import BUILTIN, PACKAGED
from postlude.recipes.config.help import first_sentence
from postlude.recipes.config.keys import (
    KIND,
    LIST,
    PLACE,
    TEXT,
    Option,
    alternatives,
    options_of,
    sections,
    stored_schema,
)
from postlude.recipes.config.packaged import config_names
from postlude.recipes.registry import RECIPES

FILES, NO_FILES = ":files", ":none"
MODELS = (*BUILTIN, *PACKAGED)
FILE_METAVARS = {"MODEL", "SRC", "ADAPTER", "DST", "RUN", "FILE", "DIR", "RUN/step-N"}

BASH = """\
# eval "$(postlude completion bash)"
_postlude() {
    local line=${COMP_LINE:0:COMP_POINT} candidate summary word before=
    word=${line##*[[:space:]]}
    [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && before=${word%%=*}=  # readline replaces what follows "="
    COMPREPLY=()
    while IFS=$'\\t' read -r candidate summary; do
        case $candidate in
            :files)
                compopt -o filenames
                while IFS= read -r candidate; do COMPREPLY+=("$candidate"); done < <(compgen -f -- "${word#"$before"}")
                ;;
            :none) ;;
            *) COMPREPLY+=("${candidate#"$before"}") ;;
        esac
    done < <("${1/#\\~/$HOME}" completion bash --line "$line" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == --*. ]] && compopt -o nospace
}
complete -F _postlude postlude
"""
ZSH = """\
#compdef postlude
# eval "$(postlude completion zsh)", after compinit; or this as the file _postlude in a directory of $fpath
_postlude() {
    local line place=:none
    local -a whole prefixes
    for line in "${(@f)$("${(Q)words[1]}" completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}"; do
        case $line in
            :*) place=$line ;;
            *.$'\\t'*) prefixes+=("${line/$'\\t'/:}") ;;
            *) whole+=("${line/$'\\t'/:}") ;;
        esac
    done
    _describe postlude whole -- prefixes -S ''
    if [[ $place == :files ]]; then
        compset -P '*='
        _files
    fi
}
if [[ $funcstack[1] == _postlude ]]; then _postlude "$@"; else compdef _postlude postlude; fi
"""
FISH = """\
# source (postlude completion fish | psub)
# postlude completion fish > ~/.config/fish/completions/postlude.fish
function __postlude_complete
    set -l program (commandline -opc)[1]
    for line in ($program completion fish --line (commandline -cp | string collect) 2>/dev/null)
        switch $line
            case :files
                set -l word (commandline -ct)
                set -l before (string match -r '^--[^=]*=' -- $word)
                for path in (__fish_complete_path (string replace -- "$before" '' $word))
                    echo "$before$path"
                end
            case :none
            case '*'
                echo $line
        end
    end
end
complete -c postlude -f -a '(__postlude_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
_Keys = dict[str, list[Option]]


@dataclass
class Candidates:
    """What may stand in a place of the command line."""

    summaries: dict[str, str] = field(default_factory=dict)
    """The candidates, each with its summary."""
    files: bool = False
    """Whether files are candidates too."""

    def add(self, words: Iterable[str], summary: str = "") -> None:
        self.summaries |= dict.fromkeys(words, summary)


def run(options: argparse.Namespace) -> None:
    if options.line is None:
        print(SCRIPTS[options.shell], end="")
        return
    words = _words(options.line)
    found = complete(words)
    for candidate, summary in found.summaries.items():
        if candidate.startswith(words[-1]):
            print(f"{candidate}\t{summary}")
    print(FILES if found.files else NO_FILES)


def _words(line: str) -> list[str]:
    """Returns the words of a line without the program's name. The last one is empty after a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote is open
        words = line.split()
    return [*words[1:], *([""] if line[-1:].isspace() or len(words) < 2 else [])]


def complete(words: Sequence[str]) -> Candidates:
    """Returns what may stand in place of the last word, whether or not it begins alike."""
    *before, current = words
    if not before:
        return _commands()
    command, *arguments = before
    parser, keys = argparse.ArgumentParser(add_help=False), _Keys()
    recipe = "grpo" if command == "demo" else command
    if recipe in RECIPES or ".py:" in recipe:  # the keys of a user's recipe are not known before its file is run
        add_recipe(parser, argparse.Action)
        keys = _keys(recipe) if recipe in RECIPES else keys
    elif table := MODEL_COMMANDS.get(command) or OTHER_COMMANDS.get(command):
        table.add(parser)
        if command == LAUNCH and arguments[1:] and arguments[1] in RECIPES:
            keys = _keys(arguments[1])
    options = {name: action for action in parser._actions for name in action.option_strings}
    key, is_assigned, _ = current.partition("=")
    previous = arguments[-1] if arguments else ""
    if is_assigned and key.startswith("--"):
        values = _values(key, options, keys)
        found = Candidates({f"{key}={value}": "" for value in values.summaries}, values.files)
    elif current.startswith("-"):
        shown = {name: action.help for name, action in options.items() if action.help != argparse.SUPPRESS}
        found = Candidates(_section(keys, current) | {name: text or "" for name, text in shown.items()})
    elif keys and previous in ("-h", "--help"):
        found = Candidates({key[2:]: summary for key, summary in _section(keys, f"--{current}").items()})
    elif re.fullmatch("--[^=]+", previous) and (previous not in options or options[previous].nargs != 0):
        found = _values(previous, options, keys)
    elif command in RECIPES:
        found = Candidates() if arguments else _configs(command)
    elif command == LAUNCH and len(arguments) == 2 and keys:
        found = _configs(arguments[1])
    else:
        positional = [action for action in parser._actions if not action.option_strings]
        place = len([word for word in arguments if not word.startswith("-")])  # an estimate: values of options count
        repeated = [action for action in positional[-1:] if action.nargs == "+"]
        found = _values_of_action(*(positional[place : place + 1] or repeated))
    return found


def _commands() -> Candidates:
    found = Candidates({"demo": "train a small model with GRPO on a CPU, in minutes: `grpo demo`"})
    for name, recipe in RECIPES.items():
        found.add([name], recipe.help)
    for name, command in (MODEL_COMMANDS | OTHER_COMMANDS).items():
        found.add([name], command.summary)
    return found


def _configs(recipe: str) -> Candidates:
    return Candidates(dict.fromkeys(config_names(recipe), "a config that comes with Postlude"), files=True)


def _keys(recipe: str) -> _Keys:
    """Returns the keys of a recipe's config by --path: one for each kind of section that has it."""
    keys = _Keys()
    for option in options_of(stored_schema(recipe)):
        if "*" not in option.path and not option.path.endswith(f".{KIND}"):
            keys.setdefault(f"--{option.path}", []).append(option)
    return keys


def _section(keys: _Keys, current: str) -> dict[str, str]:
    """Returns the keys of the section that `current` is in. A section below it is a candidate that ends with a dot."""
    depth, found = current.count("."), dict[str, str]()
    for path, same in keys.items():
        parts = path.split(".")
        if len(parts) > depth + 1:
            found[".".join([*parts[: depth + 1], ""])] = "keys of this section"
        elif any(_takes_value(option) for option in same):
            found[path] = first_sentence(same[0].help)
    return found


def _takes_value(option: Option) -> bool:
    """Returns whether the key itself can be set, not only the keys of its section."""
    kinds = sections(option.node)
    return not kinds or any(kinds) or any(TEXT in section for section in kinds.values())


def _values(name: str, options: dict[str, argparse.Action], keys: _Keys) -> Candidates:
    if name in options:
        return _values_of_action(options[name])
    found = Candidates()
    for option in keys.get(name, ()):
        found.add(kind for kind, section in sections(option.node).items() if kind and LIST not in section)
        for shape in alternatives(option.node):
            found.add(str(choice) for choice in shape.get("enum", ()))
            if shape.get("type") == "boolean":
                found.add(["true", "false"])
            found.add(MODELS if shape.get(PLACE) == "model" else (), "a built-in model")
            found.files |= PLACE in shape or shape.get("format") == "path"
    return found


def _values_of_action(action: argparse.Action | None = None) -> Candidates:
    if action is None:
        return Candidates()
    found = Candidates(files=action.metavar in FILE_METAVARS)
    found.add(map(str, action.choices or ()))
    if action.metavar in ("MODEL", "SRC"):
        found.add(MODELS, "a built-in model")
    elif action.dest == "device":
        found.add(["cpu", "cuda"])
    return found
