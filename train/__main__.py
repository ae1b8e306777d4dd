"""The command `zoo`: `zoo chat NAME` is `python -m zoo chat NAME`, and `zoo sft ...` is `python -m train.sft ...`."""

import runpy
import sys


# Command -> the module that it runs, and what that does.
COMMANDS = {
    "chat": ("zoo", "chat with a model in the terminal"),
    "serve": ("zoo", "serve a model by OpenAI's API"),
    "evaluate": ("zoo", "run tasks of lm-eval"),
    "verify": ("zoo", "compare a checkpoint with transformers"),
    "merge": ("zoo", "merge an adapter into its model"),
    "to-hub": ("zoo", "export a checkpoint of a run in the Hub's layout"),
    "to-orbax": ("zoo", "write a model as a checkpoint of Orbax"),
    "to-gguf": ("zoo", "write a model as a GGUF file for llama.cpp"),
    "sft": ("train.sft", "fine-tune on chats, completions or texts"),
    "pretrain": ("train.pretrain", "train from random weights"),
    "dpo": ("train.dpo", "train on preferences: DPO, IPO, ORPO, KTO"),
    "grpo": ("train.grpo", "train with rewards: GRPO, DAPO, Dr. GRPO, GSPO"),
    "reward": ("train.reward", "train a model that rates texts"),
    "classify": ("train.classify", "train a classifier"),
    "embed": ("train.embed", "train a model that embeds texts"),
    "mine": ("train.mine", "find hard negatives by a model that embeds"),
    "distill": ("train.distill", "train on a larger model's predictions"),
    "inspect": ("train.inspect", "count and check the data of a run"),
    "prepare": ("train.prepare", "tokenize and pack data once"),
    "plan": ("train.plan", "compile a step for devices that are not here: memory, traffic, time"),
    "launch": ("train.launch", "start a run in several processes"),
    "compare": ("train.compare", "compare the metrics of runs"),
    "replay": ("train.replay", "compute a bad step of a run again"),
    "report": ("train.report", "write a run's page again"),
    "completion": ("train.completion", "print what completes these commands and their options in bash or zsh"),
}


def main() -> None:
    """Runs the module of the command that is named first; without one, lists the commands."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("usage: zoo COMMAND ...\n\n" + "\n".join(f"  {name:10} {does}" for name, (_, does) in COMMANDS.items()))
        print("\nzoo COMMAND --help lists the options of a command.")
        return
    if name not in COMMANDS:
        raise SystemExit(f"There is no command {name!r}: give one of {', '.join(COMMANDS)}.")
    module, _ = COMMANDS[name]
    if module != "zoo":  # whose first argument is the command
        del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
