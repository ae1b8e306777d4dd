"""--program: a run uses a step that was compiled before, with the same losses; any other is refused, with a reason."""

import contextlib
import hashlib
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from tests.train.conftest import losses, run
from train import plan as script
from train.base import program
from train.base.chips import CHIPS
from train.planning import planner
from train.run import folder
from zoo.mesh import make_mesh


def explaining(options, **changes):
    return program.explaining(options, **dict(model="tiny", remat="dots", microbatches=1) | changes)


def traced(mesh="fsdp=2", size=4, scale=2.0, name="weights"):
    """Returns a step of a state and a batch, and its arguments."""
    mesh = make_mesh(mesh, jax.devices()[:2])
    place = NamedSharding(mesh, P())
    arguments = {name: jnp.arange(size, dtype=jnp.float32)}, jnp.ones(size)
    step = jax.jit(lambda state, x: (jax.tree.map(lambda a: a * scale, state), x.sum()), donate_argnums=0)
    return step, jax.device_put(arguments, place)


@contextlib.contextmanager
def uncached():
    """Compiles without the cache, like train.plan, because XLA does not serialise all of a cached program."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "step"
    step, arguments = traced()
    lowered = step.lower(*arguments)
    with uncached():
        program.write(path, lowered, lowered.compile(), explaining({"--lr": 0.1, "--seed": 1}))
    return path


def load(path, *arguments, **changes):
    """Loads the program into a run with the file's options, except for changes, and calls its step once."""
    told = explaining({"--lr": 0.1, "--seed": 2, **dict(arguments)}, **changes.pop("o", {}))
    step, own = traced(**changes)
    return program.loaded(path, step, told)(*own)


def test_what_was_compiled_is_called(saved, monkeypatch):
    def compile(*_, **__):
        raise AssertionError("compiled")

    with monkeypatch.context() as patch:
        patch.setattr(program.compiler, "backend_compile_and_load", compile)
        state, total = load(saved)
    np.testing.assert_array_equal(state["weights"], [0, 2, 4, 6])
    assert total == 4 and not list(saved.parent.glob("*.tmp"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scale": 3.0}, "another step, with the same options and shapes: of another model, or of other code: make it"),
        ({"o": {"remat": "full"}, "scale": 3.0}, "step: --remat was dots, and is full here: make it again with"),
        ({"size": 8}, r"its argument \[0\]\['weights'\] is float32\[4\], and float32\[8\] here: make"),
        ({"name": "others"}, r"its argument \[0\]\['weights'\] is float32\[4\], and None here: make"),
        ({"mesh": "tensor=2"}, r"is for 2 x cpu \(fsdp=2\), and this run has 2 x cpu \(tensor=2\): make"),
    ],
)
def test_another_step_is_refused(saved, changes, sentence):
    with pytest.raises(ValueError, match=f"^--program {saved} .*{sentence}"):
        load(saved, **changes)


def test_other_options_are_named(saved):
    with pytest.raises(ValueError, match=r"--lr was 0\.1, and is 0\.2 here; --model was tiny, and is gpt2 here: make"):
        load(saved, ("--lr", 0.2), scale=3.0, o={"model": "gpt2"})


@pytest.mark.parametrize("name", ["jax", "jaxlib", "equinox-zoo", "compiler"])
def test_another_version_is_refused(saved, tmp_path, name):
    line, _, code = saved.read_bytes().partition(b"\n")
    about = json.loads(line)
    now, path = about[name], tmp_path / "step"
    path.write_bytes(json.dumps(about | {name: "0.1"}).encode() + b"\n" + code)
    with pytest.raises(ValueError, match=f"{path} was compiled with {name} 0.1, and this is {now}: make it again"):
        load(path)


def test_what_is_no_program(saved, tmp_path):
    """A pickle is never unpickled. An executable that is incomplete, or that XLA does not know, is refused."""
    path = tmp_path / "step"
    path.write_bytes(pickle.dumps(SystemExit))
    with pytest.raises(ValueError, match=f"^--program {path} is no program: train.plan --save writes such"):
        load(path)
    path.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"^--program {path} is damaged: copy it again"):
        load(path)
    about = json.loads(saved.read_bytes().partition(b"\n")[0])
    path.write_bytes(json.dumps(about | {"executable": hashlib.sha256(b"nothing").hexdigest()}).encode() + b"\nnothing")
    with pytest.raises(ValueError, match=f"^--program {path} can't be loaded here: ."):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


def test_kernels_do_not_tell_where_they_were_traced():
    text = 'stablehlo.custom_call @kernel(%0) {{backend_config = "{}"}}\nconstant dense<"0x{}">'
    hashed = lambda *parts: program.KERNEL.sub("", text.format(*parts))
    assert hashed("/a" * 900, "0" * 900) == hashed("/b" * 900, "0" * 900) != hashed("/a" * 900, "1" * 900)
    assert hashed("/a", "") != hashed("/b", "")


@pytest.mark.slow
def test_a_run_with_a_plan_s_program(base, tmp_path, quick, monkeypatch, capsys):
    """The plan's step equals the run's, bit for bit; with another learning rate it is refused."""
    o = planner.Options.of(
        model=str(base / "model"), topology="v6e-1", batch=4, seq=32, remat="dots", steps=8, lr=1e-2, mesh="fsdp=1"
    )
    config = zoo.config(o.model)
    monkeypatch.setattr(planner, "make_mesh", make_mesh)  # the `make_mesh` of `quick` already sets the devices
    made = script.plan(o, config, CHIPS["v6e"], jax.devices()[:1])
    planned, path = script.script(o, config), tmp_path / "step"
    told = explaining(folder.defining_options(planned), model=planned.model)
    program.write(path, made.compiled.lowered, made.compiled.executable, told)
    own = dict(compute_dtype="bfloat16", sample_every=100)
    want = run(base, tmp_path / "compiled", **own)
    assert "nothing was compiled" not in capsys.readouterr().out
    got = run(base, tmp_path / "loaded", program=path, **own)
    assert "nothing was compiled" in " ".join(capsys.readouterr().out.split())
    assert losses(got) == losses(want) and len(losses(got)) == 8
    with pytest.raises(ValueError, match=r"of another step: --lr was 0\.01, and is 0\.02 here: make it again"):
        run(base, tmp_path / "refused", program=path, lr=2e-2, **own)
