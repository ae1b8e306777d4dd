"""A script that prints what completes `zoo` in a shell: `python -m train.completion --help`.

    zoo completion bash > ~/.local/share/bash-completion/completions/zoo
    zoo completion zsh > ~/.zoo-completion && echo 'source ~/.zoo-completion' >> ~/.zshrc

It asks each command for its options.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from typing import Literal

import tyro

from train.__main__ import COMMANDS


FUNCTION = """\
_zoo() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=""
    case $COMP_CWORD,${{COMP_WORDS[1]}} in
        1,*) words="{commands}" ;;
{options}
    esac
    COMPREPLY=()
    if [[ $COMP_CWORD == 1 || $word == -* ]]; then COMPREPLY=($(compgen -W "$words" -- "$word")); fi
}}
complete -o default -F _zoo zoo
"""


def options_of(command: str) -> list[str]:
    """Returns the options that a command's help lists, all of them if it has a help for that."""
    module, _ = COMMANDS[command]
    for flag in ("--help-all", "--help"):
        sys.argv = [module, *([command] if module == "zoo" else []), flag]
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.redirect_stderr(io.StringIO()):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                if not end.code:
                    break
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", shown.getvalue())))


def main(shell: tyro.conf.Positional[Literal["bash", "zsh"]]) -> None:
    """Prints what completes the commands of `zoo`, and their options.

    Args:
        shell: the shell that reads it.
    """
    os.environ["COLUMNS"] = "200"  # so that no option is broken over two lines
    found = {command: options_of(command) for command in COMMANDS}
    options = "\n".join(f'        *,{command}) words="{" ".join(flags)}" ;;' for command, flags in found.items())
    if shell == "zsh":
        print("autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit")
    print(FUNCTION.format(commands=" ".join(COMMANDS), options=options), end="")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m train.completion")
