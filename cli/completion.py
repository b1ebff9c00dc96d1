"""`tune completion`: what the Tab key offers in a shell."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args, get_origin

from solotune.config.command_line import Parser
from solotune.config.nodes import dotted_keys, read_file
from solotune.config.registry import configs, find_config, find_recipe, find_recipe_of, recipes
from solotune.config.schema import Field, read_schema
from solotune.errors import UserError

from .main import VERBS

HELP = """\
Print what makes a shell complete verbs, recipes, configs, keys and values of `tune`.

  bash:  add to ~/.bashrc   eval "$(tune completion bash)"
  zsh:   add to ~/.zshrc    eval "$(tune completion zsh)"   (after compinit)
  fish:  tune completion fish > ~/.config/fish/completions/tune.fish"""

# Bash splits words at `=`, so that it wants a value without its key.
_BASH = """\
_tune() {
    local line="${COMP_LINE:0:COMP_POINT}" IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion --line "$line" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    [[ $line =~ =[^[:space:]]*$ ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
    return 0
}
complete -o default -F _tune tune
"""
_ZSH = """\
#compdef tune
_tune() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a found=(${(f)"$(${words[1]} completion --line "$line" 2>/dev/null)"})
    if (( ! $#found )); then
        compset -P '*='
        _files
    elif [[ $found[1] == *= ]]; then
        compadd -S '' -- $found
    else
        compadd -- $found
    fi
}
compdef _tune tune
"""
_FISH = """\
function __tune_find
    set -g __tune_found (tune completion --line (commandline -cp) 2>/dev/null)
    test -n "$__tune_found"
end
complete -c tune -f -n __tune_find -a '$__tune_found'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_RUN = ("--config", "--trust", "--debug", "--help")
FLAGS = {
    "run": _RUN,
    "sweep": (*_RUN, "--random", "--seed", "--max-loss"),
    "merge": ("--debug", "--help"),
    "validate": (*_RUN, "--recipe"),
    "plan": (
        *(*_RUN, "--recipe", "--device-profile", "--vram", "--ram", "--disk"),
        *("--json", "--plot", "--write", "--measure"),
    ),
    "ls": ("--json", "--help"),
    "cp": ("--force", "--help"),
    "env": ("--json", "--help"),
    "convert-config": ("--force", "--help"),
    "download": ("--output-dir", "--hf-token", "--revision", "--ignore-patterns", "--help"),
    "inspect data": (*_RUN, "--recipe", "--samples", "--validation", "--json", "--html"),
    "inspect model": (*_RUN, "--recipe", "--json"),
}
_CHOICES = {"completion": tuple(SCRIPTS), "inspect": ("data", "model")}


def main(words: list[str]) -> int:
    """Print the script of a shell, or with `--line` what completes the last word of a line."""
    parser = Parser(prog="tune completion", description=HELP)
    parser.add_argument("shell", nargs="?", choices=SCRIPTS, help="the shell to complete in")
    parser.add_argument("--line", help="what was typed so far: print what may end it")
    options = parser.parse_args(words)
    if options.line is not None:
        print("".join(f"{word}\n" for word in candidates(options.line)), end="")
    elif options.shell:
        print(SCRIPTS[options.shell], end="")
    else:
        parser.error(f"name a shell: {', '.join(SCRIPTS)}")
    return 0


def candidates(line: str) -> list[str]:
    """Return the words that the last word of `line` may become; none where a file is meant."""
    typed = line.split()[1:]
    if not typed or line[-1].isspace():
        typed.append("")
    *before, current = typed
    try:
        offered = _offered(before, current)
    except (UserError, OSError):  # a recipe or config that is not written to its end
        offered = ()
    return sorted({word for word in offered if word.startswith(current)})


def _offered(before: list[str], current: str) -> Iterable[str]:
    if not before:
        return VERBS
    verb, *rest = before
    if verb in _CHOICES and not rest:
        return _CHOICES[verb]
    if verb == "inspect":
        verb, rest = f"inspect {rest[0]}", rest[1:]
    if rest and rest[-1] == "--config":
        return configs()
    if current.startswith("-"):
        return FLAGS.get(verb, ("--help",))
    if verb in ("completion", "merge"):  # folders, which the shell offers
        return ()
    if verb in ("cat", "cp") and not rest:
        return [*recipes(), *configs()]
    if verb == "diff" and len(rest) == 1:
        return [*recipes(), *configs()]
    if verb in ("run", "sweep") and not rest:
        return recipes()
    if verb.startswith(("validate", "inspect", "plan")) and not rest:
        return [*configs(), *recipes()]
    return _settings(rest, current)


def _settings(words: list[str], current: str) -> Iterable[str]:
    """Return `key=` for each key of the recipe and of the nodes of its config, or their values."""
    config, recipe = _named(words)
    if recipe is None:
        return ()
    schema = read_schema(recipe)
    key, equals, _ = current.partition("=")
    if equals:
        return [f"{key}={value}" for value in _values(schema.get(key))]
    tree = read_file(config)[0].items if config else {}
    inner = [
        name
        for node, child in tree.items()
        if node in schema and schema[node].takes_component
        for name in dotted_keys(child, node)
    ]
    return [f"{name}=" for name in (*schema, *inner)]


def _named(words: list[str]) -> tuple[Path | None, Path | None]:
    """Return the config and the recipe among the words."""
    config = None
    if "--config" in words[:-1]:
        config = find_config(words[words.index("--config") + 1])
    elif words and (words[0] in configs() or words[0].endswith((".yaml", ".yml"))):
        config = find_config(words[0])
    named = [word for word in words if word in recipes() or word.endswith(".py")]
    if named:
        return config, find_recipe(named[0])
    return config, find_recipe_of(config) if config else None


def _values(field: Field | None) -> Iterable[str]:
    """Return the values that a key's type lists."""
    members = (get_args(field.annotation) or (field.annotation,)) if field else ()
    if field and get_origin(field.annotation) is Literal:
        members = (field.annotation,)
    for member in members:
        if member is bool:
            yield from ("True", "False")
        elif get_origin(member) is Literal:
            yield from map(str, get_args(member))
