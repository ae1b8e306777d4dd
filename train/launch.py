"""A script that starts a training script in several processes, and again when one is lost: `python -m train.launch`.

    python -m train.launch --processes 4 --elastic -- python -m train.sft --out runs/a --data chats/ --mesh fsdp=-1

It runs one process on each host of --hosts, by default all on this machine. When a process is lost, the others can't go
on. So the launcher ends them and starts the command again, which goes on from its last checkpoint. With --elastic it
starts again at once on the hosts that are left, and on all hosts when the lost ones are back. A cluster's own launcher
that does the same, such as Kubernetes' JobSet, is as good.
"""

import sys
from collections.abc import Sequence

from train.base import runfile
from train.run.launcher import Launcher, LaunchOptions


def main(arguments: Sequence[str]) -> int:
    """Runs the command after "--" with the launcher's options before "--". Returns the exit code."""
    if not {"--", "-h", "--help", "--help-all"}.intersection(arguments):
        raise ValueError("Write the command after --, as in: python -m train.launch --processes 2 -- python -m ...")
    mine = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    o = runfile.parse(LaunchOptions, mine)
    say = lambda text: print(f"train.launch: {text}", file=sys.stderr, flush=True)
    return Launcher(o, arguments[len(mine) + 1 :], say).run()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
