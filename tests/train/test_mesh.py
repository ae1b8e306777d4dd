"""Meshes from words, on eight devices that are not really there."""

import jax
import numpy as np
import pytest

from train.mesh import make_mesh, put_batch


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("fsdp=-1", (1, 8, 1)),
        ("fsdp=4,tensor=2", (1, 4, 2)),
        ("tensor=2, replica=2, fsdp=-1", (2, 2, 2)),
        ("tensor=8,fsdp=-1", (1, 1, 8)),
    ],
)
def test_make_mesh(text, shape):
    mesh = make_mesh(text)
    assert mesh.axis_names == ("replica", "fsdp", "tensor") and mesh.devices.shape == shape
    assert all(kind == jax.sharding.AxisType.Auto for kind in mesh.axis_types)


def test_some_devices():
    assert make_mesh(devices=jax.devices()[:3]).shape["fsdp"] == 3


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
    with pytest.raises(ValueError, match="6 sequences of 'tokens' can't be split over 4 devices"):
        put_batch({"tokens": np.zeros((6, 3), int)}, mesh)
