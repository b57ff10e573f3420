"""Shell completion of `cloze`: a script with all commands, fields and values, so that TAB does not start Python."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from cloze.launch.parsing.fields import Described
from cloze.launch.parsing.help_pages import Page
from cloze.launch.parsing.parser import shipped

# The function that bash calls. It completes flags, or the values of the flag before the cursor; bash splits words at
# "=". If it finds nothing, or if a value may be a file, bash completes names of files, unless none can stand there.
_BASH = r"""_cloze() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
    local command="${COMP_WORDS[1]}" words="" from=2 files=yes
    COMPREPLY=()
    if [ "$word" = "=" ]; then word=""; elif [ "$before" = "=" ]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "FIRST --help --version" -- "$word")); return 0
    fi
    case " GROUPS " in *" $command "*)
        if [ "$COMP_CWORD" -eq 2 ]; then words="$(_cloze_group "$command")"
            COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word")); return 0
        fi
        from=3
        case " $(_cloze_group "$command") " in *" ${COMP_WORDS[2]} "*) command="$command ${COMP_WORDS[2]}";;
            *) command="$command MODEL";;
        esac;;
    esac
    case "$before" in
        --help) words="$(_cloze_topics "$command")" files="";;
        --*) words="$(_cloze_values "$command" "$before")" files="$(_cloze_files "$command" "$before")";;
        *) [ "$COMP_CWORD" -eq "$from" ] && words="$(_cloze_values "$command" WORD)" &&
            files="$(_cloze_files "$command" WORD)";;
    esac
    case "$word" in -*) words="$(_cloze_flags "$command") --print_config --help" files="";; esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [ "$files" ]; then COMPREPLY+=($(compgen -f -- "$word"));
    else compopt +o default +o bashdefault 2> /dev/null; fi
    return 0
}"""


@dataclass(frozen=True)
class _Flag:
    name: str
    """The flag with its dashes; WORD for the word without a flag."""
    values: list[str]
    takes_files: bool
    """Whether a file may be its value, too."""
    sentence: str


def completion_script(shell: str, pages: list[Page]) -> str:
    """The script that a shell reads.

    Args:
        shell: bash, zsh or fish.
        pages: of all commands.
    """
    if shell == "fish":
        return _fish(pages)
    firsts = list(dict.fromkeys(page.name.split()[0] for page in pages))
    groups = list(dict.fromkeys(page.name.split()[0] for page in pages if " " in page.name))
    flags = {page.name: list(_flags(page)) for page in pages}
    for name in groups:  # in place of an operation may stand a model: then what all operations take
        several = [each for page, each in flags.items() if page.startswith(f"{name} ")]
        shared = set.intersection(*({(flag.name, *flag.values) for flag in each} for each in several))
        flags[f"{name} MODEL"] = [flag for flag in several[0] if (flag.name, *flag.values) in shared]
    lines = [
        *(["autoload -Uz compinit bashcompinit && compinit && bashcompinit"] if shell == "zsh" else []),
        *_function(
            "_cloze_group",
            {name: [page.name.split()[1] for page in pages if page.name.startswith(f"{name} ")] for name in groups},
        ),
        *_function(
            "_cloze_flags", {name: [flag.name for flag in each if flag.name != "WORD"] for name, each in flags.items()}
        ),
        *_function(
            "_cloze_topics",
            {page.name: ["all", *(each.name for each in page.fields.values() if each.is_section)] for page in pages},
        ),
        *_function(
            "_cloze_values",
            {f"{name} {flag.name}": flag.values for name, each in flags.items() for flag in each if flag.values},
        ),
        *_function(
            "_cloze_files",
            {f"{name} {flag.name}": [] for name, each in flags.items() for flag in each if not flag.takes_files},
            otherwise="yes",
        ),
        _BASH.replace("FIRST", " ".join(firsts)).replace("GROUPS", " ".join(groups)),
        "complete -o bashdefault -o default -o filenames -F _cloze cloze",
    ]
    return "\n".join(lines)


def _function(name: str, words: dict[str, list[str]], otherwise: str = "") -> list[str]:
    """A function of the shell: for the arguments that are a key of `words` it prints the words, else `otherwise`."""
    cases = [f"    {shlex.quote(key)}) echo {shlex.quote(' '.join(values))};;" for key, values in words.items()]
    return [f'{name}() {{ case "$*" in', *cases, *([f"    *) echo {otherwise};;"] if otherwise else []), "esac; }"]


def _flags(page: Page) -> Iterator[_Flag]:
    brief = {whole: short for short, whole in page.short}
    for field in page.fields.values():
        values = list(page.table_of(field.name)) or _values(field)
        files = field.takes_files and field.name not in dict(page.listed)
        if page.is_word(field):
            if values:
                yield _Flag("WORD", values, files, field.sentence)
            continue
        for name in dict.fromkeys((brief.get(f"--{field.name}", f"--{field.name}"), f"--{field.name}")):
            yield _Flag(name, values, files, field.sentence)
    yield _Flag("--config", list(shipped(page.configs)) if page.configs else [], True, "YAML file of fields.")


def _values(field: Described) -> list[str]:
    return list(shipped(field.name.rpartition(".")[2])) if field.is_section else field.choices


def _fish(pages: list[Page]) -> str:
    lines, seen = ["complete -c cloze -e"], set()
    for page in pages:
        first, *second = page.name.split()
        if first not in seen:
            about = f"{first} ..." if second else page.about
            lines.append(f"complete -c cloze -n __fish_use_subcommand -a {first} -d {shlex.quote(about)}")
            seen.add(first)
        if second:
            lines.append(
                f"complete -c cloze -n '__fish_seen_subcommand_from {first}' -a {second[0]} "
                f"-d {shlex.quote(page.about)}"
            )
        given = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in page.name.split())
        for flag in _flags(page):
            takes = "" if flag.name == "WORD" else f" -l {flag.name.removeprefix('--')} -r"
            takes += "" if flag.takes_files else " -f"
            values = f" -a {shlex.quote(' '.join(flag.values))}" if flag.values else ""
            said = shlex.quote(flag.sentence.split(";")[0].split(":")[0].split(". ")[0])
            lines.append(f"complete -c cloze -n '{given}'{takes}{values} -d {said}")
    return "\n".join(lines)
