"""The snippets of docs/hacking.md run one after another, and print what the page shows."""

import contextlib
import io
import pathlib
import re
import sys

import jax
import pytest

import zoo
from tests.close import close
from tests.zoo.programs import MODEL


ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/hacking.md").read_text()


@pytest.mark.thorough
def test_page(tmp_path, monkeypatch, untyped):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])  # the page installs a hook
    names = {}
    for lines in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        as_for_users = jax.numpy_dtype_promotion("standard")
        with as_for_users, jax.numpy_rank_promotion("allow"), contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(lines, "docs/hacking.md", "exec"), names)
        shown = "".join(line[2:] for line in lines.splitlines(True) if line.startswith("# "))
        if lines == "print(model)\n":
            (shown,) = re.findall(r"<!-- printed -->\n```text\n(.*?)```", PAGE, flags=re.DOTALL)
        assert printed.getvalue() == shown, lines
    assert zoo.load(tmp_path / "mine").config == names["model"].config
    # The weights by hand give what the layer's attention gives.
    attention = names["attention"]
    _, found = zoo.capture(names["model"], "layers.1.self_attn", "layers.1.self_attn.v_proj")(names["tokens"])
    v = found["layers.1.self_attn.v_proj"].reshape(1, 10, -1, attention.head_dim).repeat(3, axis=2)
    mixed = (names["weights"] @ v.swapaxes(1, 2)).swapaxes(1, 2).reshape(1, 10, -1)
    close(attention.o_proj(mixed), found["layers.1.self_attn"], terms=MODEL)
