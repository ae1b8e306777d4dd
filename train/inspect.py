"""A script that inspects data, or a prepared store, as a model would learn from it: `python -m train.inspect --help`.

    python -m train.inspect chats/ --model llama3.1-8b --seq-len 4096 --html chats.html
    python -m train.inspect prepared --verify

It counts records and tokens, cut ends, duplicates, and records with nothing to learn, and measures how full rows are.
In samples, text that is not learnt is dimmed.
"""

import pathlib
import sys

import jax
import rich

from convert.private import public, warn_of_secrets
from train.base import runfile
from train.data import store
from train.run.inspection import InspectOptions, Summary, of_records, of_store, page, show


def main(o: InspectOptions) -> list[Summary]:
    """Prints a report on each --data, and writes the page.

    Raises:
        ValueError, OSError: the data cannot be read, records cannot be learnt from (raised after all is printed), or a
            store is of another tokenizer or damaged.
    """
    for name, least in (("seq_len", 1), ("records", 0), ("samples", 0)):
        if getattr(o, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(o, name)} must be at least {least}.")
    found = []
    for path in o.data:
        found += of_store(o, pathlib.Path(path)) if store.is_store(path) else [of_records(o, path)]
    for each in found:
        show(each)
    if o.html:
        new = o.html.with_name(f"{o.html.name}.tmp")
        new.write_text(page(found), encoding="utf-8")
        new.replace(o.html)
        rich.print(f"\nWritten to {o.html}.")
    if bad := [each.title for each in found if each.problems]:
        raise ValueError(f"{', '.join(bad)}: a run would refuse the records that cannot be learnt from, see above.")
    return found


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # other processes may be using an accelerator
    warn_of_secrets(sys.argv)
    try:
        main(runfile.parse(InspectOptions))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(public(f"{type(error).__name__}: {error}")) from error
