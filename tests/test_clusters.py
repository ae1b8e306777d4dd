"""The files of examples/clusters, without a cluster: their syntax, their fields, and the commands that they start."""

import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

from train import sft
from train.base import runfile


ROOT = pathlib.Path(__file__).parents[1]
CLUSTERS = ROOT / "examples" / "clusters"
DOCKERFILES = sorted(CLUSTERS.glob("Dockerfile.*"))


@pytest.mark.parametrize("ends, requeued", [(0, False), (75, True), (1, False)])
def test_slurm(tmp_path, ends, requeued):
    """The job starts train.sft with options that it has, and puts itself back only where the run is not finished."""
    script = CLUSTERS / "sft.sbatch"
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    for name, code in {"srun": ends, "scontrol": 0}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", script, "--seed", "3"], env=environment, capture_output=True, text=True)
    assert done.returncode == ends, done.stderr
    started, *more = (tmp_path / "called").read_text().splitlines()
    assert started.startswith("srun .venv/bin/python -m train.sft ")
    o = runfile.parse(sft.SFTOptions, shlex.split(started)[4:])
    assert (o.step.mesh, o.seed, str(o.out)) == ("replica=2,fsdp=-1", 3, "/shared/runs/sft")
    assert more == (["scontrol requeue 17"] if requeued else [])


def test_slurm_directives():
    """All directives come before the first command, where sbatch reads them; tasks and GPUs of a node are as many."""
    lines = (CLUSTERS / "sft.sbatch").read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first:] if line.startswith("#SBATCH")]
    said = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    found = dict(re.fullmatch(r"--([a-z-]+)(?:=(\S+))?", line).groups() for line in said)
    assert found["ntasks-per-node"] == found["gpus-per-node"] and found["signal"] == "USR2@120" and "requeue" in found
    assert f"replica={found['nodes']}," in "\n".join(lines)


def test_jobset():
    """Pods, chips and the mesh fit each other, and the container starts train.sft with options that it has."""
    made = yaml.safe_load((CLUSTERS / "jobset.yaml").read_text())
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = made["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["parallelism"] == spec["completions"] and pod["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    sizes = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert spec["completions"] * container["resources"]["limits"]["google.com/tpu"] == math.prod(sizes)
    assert container["command"] == ["python", "-m", "train.sft"]
    o = runfile.parse(sft.SFTOptions, container["args"])
    assert o.step.mesh == f"replica={job['replicas']},fsdp=-1"
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"] and str(o.out).startswith(mount["mountPath"])
    assert all(each["value"].startswith(mount["mountPath"]) for each in container["env"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(path):
    """Each instruction is Docker's, and the image has extras that pyproject.toml has."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    found = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert found[0][0] == "FROM" and {name for name, _ in found} <= {
        "FROM", "ENV", "WORKDIR", "COPY", "RUN", "ENTRYPOINT", "CMD",
    }  # fmt: skip
    told = dict(found)
    assert told["COPY"] == ". ." and all(isinstance(json.loads(told[name]), list) for name in ("ENTRYPOINT", "CMD"))
    assert subprocess.run(["bash", "-n", "-c", told["RUN"]], capture_output=True).returncode == 0
    (extras,) = re.findall(r"-e '\.\[([\w,-]+)\]'", told["RUN"])
    have = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= have.keys() and path.suffix[1:] in extras.split(",")
    assert f"examples/clusters/{path.name}" in path.read_text()


def test_both_are_there():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cuda", "Dockerfile.tpu"]
