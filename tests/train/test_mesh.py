"""Meshes from text, on eight fake devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.zoo import tiny
from train.state.mesh import balanced, check_mesh, keeps_order, next_token, put_batch, without_stages
from zoo import surgery
from zoo.config import read
from zoo.mesh import AXES, make_mesh
from zoo.models import mixtral, nemotron_h, qwen3
from zoo.weights.checkpoint import skeleton


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("fsdp=-1", (1, 1, 8, 1, 1, 1)),
        ("fsdp=4,tensor=2", (1, 1, 4, 1, 1, 2)),
        ("tensor=2, replica=2, fsdp=-1", (1, 2, 2, 1, 1, 2)),
        ("tensor=8,fsdp=-1", (1, 1, 1, 1, 1, 8)),
        ("stage=2,expert=2,context=-1", (2, 1, 1, 2, 2, 1)),
    ],
)
def test_make_mesh(text, shape):
    mesh = make_mesh(text)
    assert mesh.axis_names == AXES and mesh.devices.shape == shape
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def test_some_devices():
    assert make_mesh(devices=jax.devices()[:3]).shape["fsdp"] == 3


class Chip:
    """One of 64 chips, wired as a torus of 4 x 4 x 4."""

    platform, device_kind, process_index, core_on_chip = "tpu", "TPU v5", 0, 0

    def __init__(self, number: int):
        self.id, self.coords = number, (number % 4, number // 4 % 4, number // 16)


def test_an_axis_may_take_part_of_one_of_the_torus():
    mesh = make_mesh("fsdp=2,expert=32", [Chip(n) for n in range(64)])
    assert mesh.devices.size == 64 and len({chip.id for chip in mesh.devices.flat}) == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=6", "'fsdp=6' needs 6 devices; there are 8"),
        ("fsdp=4", "needs 4 devices; there are 8"),
        ("fsdp=-1,tensor=3", "needs a multiple of 3 devices; there are 8"),
        ("fsdp=-1,tensor=-1", "leaves fsdp and tensor open"),
        ("data=8", "'data=8' in the mesh"),
        ("fsdp=0", "'fsdp=0' in the mesh"),
        ("fsdp=2,fsdp=4", "'fsdp=4' in the mesh"),
        ("fsdp", "'fsdp' in the mesh"),
        ("", "'' in the mesh"),
    ],
)
def test_what_is_no_mesh(text, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(text)


def test_put_batch():
    mesh = make_mesh("replica=2,fsdp=2,tensor=2")
    batch = put_batch({"tokens": np.arange(24).reshape(8, 3)}, mesh)
    assert batch["tokens"].addressable_shards[0].data.shape == (2, 3)
    assert batch["tokens"].tolist() == np.arange(24).reshape(8, 3).tolist()
    with pytest.raises(ValueError, match="6 sequences of 'tokens' can't be split over 4 devices"):
        put_batch({"tokens": np.zeros((6, 3), int)}, mesh)


def test_put_batch_along_the_context():
    """Each device has its share of the front and of the back of every sequence."""
    mesh = make_mesh("fsdp=4,context=2")
    batch = put_batch({"tokens": np.arange(32).reshape(4, 8)}, mesh)
    shards = {shard.device: shard.data for shard in batch["tokens"].addressable_shards}
    first, second = (shards[device].tolist() for device in mesh.devices.reshape(4, 2)[0])
    assert first == [[0, 1, 6, 7]] and second == [[2, 3, 4, 5]]
    with pytest.raises(ValueError, match="6 tokens can't be cut into 4 pieces, two for each of context=2"):
        put_batch({"tokens": np.zeros((4, 6), int)}, mesh)


def test_put_batch_keeps_the_order_that_a_model_needs():
    """The order depends on all models that read the batch: student, teacher and reference. `next_token` follows it."""
    dense, hybrid = (
        skeleton(module.FAMILY, read(module.FAMILY, tiny.CONFIGS[name]))
        for module, name in ((qwen3, "qwen3"), (nemotron_h, "nemotron_h"))
    )
    mesh, rows = make_mesh("fsdp=4,context=2"), np.arange(32).reshape(4, 8)
    for models, moved in (((dense, None), True), ((dense, hybrid), False), ((hybrid, None), False)):
        batch = put_batch({"tokens": rows, "positions": rows % 8}, mesh, *models)
        with jax.set_mesh(mesh):
            following = jax.jit(lambda batch: next_token(batch["tokens"], batch))(batch)
        assert keeps_order(mesh, *models) == (not moved) and ("positions" in batch) == moved
        order = balanced(8, 2) if moved else np.arange(8)
        assert batch["tokens"].tolist() == rows[:, order].tolist()
        assert following.tolist() == np.pad(rows[:, 1:], ((0, 0), (0, 1)))[:, order].tolist()
    with pytest.raises(ValueError, match="7 tokens of 'tokens' can't be split over context=2"):
        put_batch({"tokens": np.zeros((4, 7), int)}, mesh, hybrid)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_balanced_is_balanced(parts):
    order = balanced(24, parts)
    assert sorted(order) == list(range(24))
    work = order.reshape(parts, -1).sum(axis=1)  # a token sees all tokens before it
    assert (work == work[0]).all()


class Slice:
    """A device in one of several slices of TPUs, with the attributes that a mesh reads."""

    platform, device_kind, process_index = "tpu", "TPU v9", 0

    def __init__(self, number: int):
        self.id, self.slice_index, self.coords, self.core_on_chip = number, number // 4, (number % 4, 0, 0), 0


def test_slices_are_divided_by_the_outer_axes():
    devices = [Slice(n) for n in range(8)]
    mesh = make_mesh("replica=2,fsdp=2,tensor=2", devices)
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices.reshape(2, 2, 2))
    assert (slices[0] == slices[0, 0, 0]).all() and (slices[1] != slices[0, 0, 0]).all()
    assert make_mesh("fsdp=8", devices).devices.reshape(2, 4)[0][0].slice_index == 0
    with pytest.raises(ValueError, match="in 2 slices, and the mesh 'replica=3,context=2' can't be divided"):
        make_mesh("replica=3,context=2", [Slice(n) for n in (0, 1, 2, 4, 5, 6)])


@pytest.mark.parametrize(
    ("text", "batch", "seq_len", "message"),
    [
        (
            "fsdp=8",
            12,
            16,
            "12 sequences of a step can't be split by fsdp = 8: it must divide them, as 1, 2, 3, 4, 6, 12",
        ),
        ("replica=2,fsdp=2,expert=2", 12, 16, "12 sequences of a step can't be split by replica\\*fsdp\\*expert = 8"),
        ("context=8", 1, 24, "24 tokens of a row can't be split by 2\\*context = 16"),
        ("tensor=8", 1, 16, "4 heads can't be split by tensor = 8: it must divide them, as 1, 2, 4 do"),
        ("stage=8", 8, 16, "3 repeated groups of layers can't be split by stage = 8: it must divide them, as 1, 3 do"),
        ("expert=8", 8, 16, "4 experts can't be split by expert = 8: it must divide them, as 1, 2, 4 do"),
    ],
)
def test_what_a_mesh_cannot_split(text, batch, seq_len, message):
    config = read(mixtral.FAMILY, tiny.CONFIGS["mixtral"])
    with pytest.raises(ValueError, match=message):
        check_mesh(make_mesh(text), skeleton(mixtral.FAMILY, config), mixtral.FAMILY, batch=batch, seq_len=seq_len)


def test_a_dense_model_has_no_experts():
    config = read(qwen3.FAMILY, tiny.CONFIGS["qwen3"])
    with pytest.raises(ValueError, match=r"expert=2 in the mesh, but qwen3 has no experts"):
        check_mesh(make_mesh("expert=2,fsdp=4"), skeleton(qwen3.FAMILY, config), qwen3.FAMILY, batch=8, seq_len=16)


def test_stages_of_several_scans():
    """Nemotron-H has three scans, which repeat 3, 1 and 5 times. A pipeline takes the scans that the stages divide."""
    model = skeleton(nemotron_h.FAMILY, read(nemotron_h.FAMILY, tiny.CONFIGS["nemotron_h-mlp-new"]))
    mesh = make_mesh("stage=3,fsdp=2", jax.devices()[:6])
    check_mesh(mesh, model, nemotron_h.FAMILY, batch=6, seq_len=16)
    specs = jax.tree.map(lambda place: place.spec, surgery.shardings(model, nemotron_h.FAMILY.partition_rules, mesh))
    pair, attention, five = specs.layers.period[1].mixer, specs.layers.period[2].mixer, specs.layers.period[3].mixer
    assert pair.up_proj.weight == P("stage", "tensor", "fsdp")
    assert attention.q_proj.weight == P(None, "tensor", "fsdp")  # of 32 features; 3 stages do not divide them
    assert five.out_proj.weight == P(None, "fsdp", "tensor")
    with pytest.raises(ValueError, match=r"5 repeated groups of layers can't be split by stage = 8: .* as 1, 5 do"):
        check_mesh(make_mesh("stage=8"), model, nemotron_h.FAMILY, batch=8, seq_len=16)


def test_without_stages():
    """Stages join fsdp, as neighbours along it, or the replicas if that does not divide the model."""
    model = skeleton(qwen3.FAMILY, read(qwen3.FAMILY, tiny.CONFIGS["qwen3"]))
    mesh = make_mesh("stage=2,replica=2,fsdp=2")
    other = without_stages(mesh, model, qwen3.FAMILY)
    assert other.devices.shape == (1, 2, 4, 1, 1, 1)
    assert set(other.devices[0, 0].flat) == set(mesh.devices[:, 0].flat)
    odd = without_stages(make_mesh("stage=3,fsdp=2", jax.devices()[:6]), model, qwen3.FAMILY)
    assert odd.devices.shape == (1, 3, 2, 1, 1, 1)
