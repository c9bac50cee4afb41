"""Files that start a training run of a plan: a torchrun script, a Slurm batch script, a job of Kubeflow.

They run the unchanged plan, with `steelyard.train` on every process. Sources: ``torchrun --help`` of torch 2.13; the
sbatch manual; the TrainJob and TrainingRuntime of Kubeflow Trainer v2 (kubeflow/trainer on GitHub,
``pkg/apis/trainer/v1alpha1`` at 0015772 and 022656a, ``manifests/base/runtimes/torch_distributed.yaml`` at 0c78efb),
whose torch policy sets PET_MASTER_ADDR, PET_MASTER_PORT and PET_NODE_RANK in the container named ``node``; the
PyTorchJob of the training operator v1 (``kubeflow.org/v1``), which sets MASTER_ADDR, MASTER_PORT and RANK (of the pod)
in each container named ``pytorch``. The TrainJob has its own runtime, so that pods have the plan and the data
regardless of a version's name for the patches of a shared runtime.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import yaml

from steelyard.engines.writing import RENDEZVOUS_PORT, Draft, Request, Target, refuse_own_module
from steelyard.errors import UserError
from steelyard.hardware import Cluster, Vendor
from steelyard.plan.file import dump_json
from steelyard.plan.plan import Plan
from steelyard.units import format_plural

Document = dict[str, Any]
"""One document of a YAML file."""
_LONGEST_NAME = 40
"""Maximum length of a model's name: Kubernetes allows 63 letters, including our prefixes and its own suffixes."""
_GPUS_OF: Mapping[Vendor, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
"""Kubernetes resource name of the GPUs of each vendor's device plugin."""
_SETTINGS = (
    "set -euo pipefail",
    'PLAN="${PLAN:-plan.json}"',
    ': "${DATA:?set DATA to the training data}"',
    'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"',
)
_TRAIN = '    -m steelyard.train "$PLAN" --data "$DATA" "$@"'
_EVERYTHING = "every layer's strategy, stages, schedule and microbatches"
_OPTIONS = "training options (--steps, --lr, --record, …): pass them to the script"


def _write_torchrun(request: Request) -> Draft:
    cluster = _cluster(request, "torchrun")
    several = cluster.num_nodes > 1
    rendezvous = (
        [
            f"--nnodes {cluster.num_nodes}",
            "--rdzv-backend c10d",
            f'--rdzv-endpoint "${{RDZV_HOST:?set RDZV_HOST to the first host}}:${{RDZV_PORT:-{RENDEZVOUS_PORT}}}"',
            '--rdzv-id "${RDZV_ID:-steelyard}"',
        ]
        if several
        else ["--standalone"]
    )
    lines = [
        "#!/bin/bash",
        *_SETTINGS,
        "",
        "exec torchrun \\",
        *(f"    {option} \\" for option in rendezvous),
        f"    --nproc-per-node {cluster.devices_per_node} \\",
        _TRAIN,
    ]
    where = "RDZV_HOST=FIRST_HOST " if several else ""
    return Draft(
        files=(("train.sh", "\n".join(lines) + "\n"),),
        carried=(_processes(request.plan, cluster), _EVERYTHING),
        left_out=(_OPTIONS,),
        launch=f"{where}PLAN=plan.json DATA=PATH bash train.sh --steps 100",
    )


def _write_slurm(request: Request) -> Draft:
    cluster = _cluster(request, "slurm")
    gpus = [f"#SBATCH --gpus-per-node={cluster.devices_per_node}"] if cluster.device.is_gpu else []
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=steelyard-{_dashed(request.plan.model.name)}",
        f"#SBATCH --nodes={cluster.num_nodes}",
        "#SBATCH --ntasks-per-node=1",
        *gpus,
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.log",
        "",
        *_SETTINGS,
        'first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "",
        "srun torchrun \\",
        f"    --nnodes {cluster.num_nodes} --nproc-per-node {cluster.devices_per_node} \\",
        f'    --rdzv-backend c10d --rdzv-endpoint "$first_host:{RENDEZVOUS_PORT}" --rdzv-id "$SLURM_JOB_ID" \\',
        _TRAIN,
    ]
    return Draft(
        files=(("train.sbatch", "\n".join(lines) + "\n"),),
        carried=(_processes(request.plan, cluster), _EVERYTHING),
        left_out=("partition, account and time limit: pass them to sbatch", _OPTIONS),
        launch="PLAN=plan.json DATA=PATH sbatch --partition NAME --time 8:00:00 train.sbatch --steps 100",
    )


def _write_kubeflow(file: str, job: Callable[[Cluster, str, str], list[Document]], request: Request) -> Draft:
    cluster = _cluster(request, "kubeflow")
    if request.image is None:
        raise UserError(
            field="--image",
            found="nothing",
            expected="the container image that has steelyard and torch",
            hint="write for example --image registry.example/steelyard:0.1",
        )
    name, plan = f"steelyard-{_dashed(request.plan.model.name)}", request.plan
    if plan.prediction is not None:
        plan = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"alternatives": ()})})
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-plan"},
            "data": {"plan.json": dump_json(plan) + "\n"},
        },
        *job(cluster, name, request.image),
    ]
    return Draft(
        files=((file, yaml.dump_all(documents, Dumper=_BlockTextDumper, sort_keys=False, width=120)),),
        carried=(_processes(plan, cluster), f"the plan itself, as a ConfigMap: {_EVERYTHING}"),
        left_out=(
            "the data: provide a PersistentVolumeClaim named training-data with one file or folder named data",
            "training options (--lr, --record, …): add them to the command",
        ),
        launch=f"kubectl apply -f {file}",
    )


class _BlockTextDumper(yaml.SafeDumper):
    """A dumper that writes text of several lines as a block, so that a plan stays readable."""


_BlockTextDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _trainjob(cluster: Cluster, name: str, image: str) -> list[Document]:
    """Return the runtime of a job of Kubeflow Trainer v2, and the job."""
    prefix = "trainer.kubeflow.org"
    pod = _pod(cluster, name, image, container="node", rank="PET_NODE_RANK", meeting="PET_MASTER")
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{prefix}/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": {"spec": pod}},
        },
    }
    policy = {"numNodes": cluster.num_nodes, "torch": {"numProcPerNode": cluster.devices_per_node}}
    kinds = {"apiVersion": f"{prefix}/v1alpha1", "metadata": {"name": name}}
    return [
        {
            **kinds,
            "kind": "TrainingRuntime",
            "spec": {"mlPolicy": policy, "template": {"spec": {"replicatedJobs": [node]}}},
        },
        {
            **kinds,
            "kind": "TrainJob",
            "spec": {
                "runtimeRef": {"apiGroup": prefix, "kind": "TrainingRuntime", "name": name},
                "trainer": {"numNodes": cluster.num_nodes},
            },
        },
    ]


def _pytorchjob(cluster: Cluster, name: str, image: str) -> list[Document]:
    """Return the job of the training operator v1."""
    pod = _pod(cluster, name, image, container="pytorch", rank="RANK", meeting="MASTER")

    def replicas(count: int) -> Document:
        return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}

    workers = {"Worker": replicas(cluster.num_nodes - 1)} if cluster.num_nodes > 1 else {}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {"pytorchReplicaSpecs": {"Master": replicas(1)} | workers},
        }
    ]


def _pod(cluster: Cluster, name: str, image: str, *, container: str, rank: str, meeting: str) -> Document:
    """Return the pod of each host; ``rank`` and ``meeting`` name the variables that the operator sets."""
    command = (
        f"exec torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.devices_per_node} "
        f'--node-rank "${rank}" --master-addr "${meeting}_ADDR" --master-port "${meeting}_PORT" '
        "-m steelyard.train /etc/steelyard/plan.json --data /data/data"
    )
    return {
        "containers": [
            {
                "name": container,
                "image": image,
                "command": ["bash", "-c", command],
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                "resources": _resources(cluster),
                "volumeMounts": [
                    {"name": "plan", "mountPath": "/etc/steelyard", "readOnly": True},
                    {"name": "data", "mountPath": "/data", "readOnly": True},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "plan", "configMap": {"name": f"{name}-plan"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": "training-data"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _resources(cluster: Cluster) -> dict[str, Any]:
    if not cluster.device.is_gpu:
        return {"requests": {"cpu": cluster.devices_per_node}}
    if cluster.device.vendor is None:
        raise UserError(
            field="device.vendor",
            found=f"nothing for {cluster.device.name!r}",
            expected=f"{' or '.join(_GPUS_OF)}, the vendor for which Kubernetes assigns GPUs to a container",
            hint="add vendor: nvidia to the device of the cluster file, and give the file with --cluster",
        )
    return {"limits": {_GPUS_OF[cluster.device.vendor]: cluster.devices_per_node}}


def _cluster(request: Request, target: str) -> Cluster:
    """Return the hosts of the plan. Raises `UserError` if they differ, are unknown or lack the plan's devices."""
    plan = request.plan
    refuse_own_module(target, plan.chain())
    cluster = request.cluster
    if cluster is None and plan.is_mixed:
        pools = plan.pools()
        hosts = sum(pool.num_nodes for pool in pools)
        raise UserError(
            field="--to",
            found=f"{target} for a plan over {len(pools)} device groups ({plan.cluster})",
            expected="a plan on one device type, because the file starts the same number of processes on every host",
            hint=f"on every host: steelyard train plan.json --data PATH --elastic --hosts {hosts}:{hosts} "
            f"--rendezvous FIRST_HOST:{RENDEZVOUS_PORT} --pool NAME, where NAME is the host's device group: "
            f"{', '.join(pool.name for pool in pools)}",
        )
    if cluster is None:
        raise UserError(
            field="--cluster",
            found=f"the plan's cluster {plan.cluster!r}, which is unknown here",
            expected=f"hosts and devices per host, from which {target} starts processes",
            hint="give --cluster with its name or file",
        )
    if cluster.num_devices != plan.num_devices:
        raise UserError(
            field="--cluster",
            found=f"{cluster.num_devices} devices",
            expected=f"the {plan.num_devices} devices of the plan",
            hint="pass the cluster that the plan was made for, or plan again",
        )
    return cluster


def _processes(plan: Plan, cluster: Cluster) -> str:
    hosts = format_plural(cluster.num_nodes, "host")
    return f"processes: {plan.num_devices} on {hosts}, {cluster.devices_per_node} on each"


def _dashed(name: str) -> str:
    """Return a name that Kubernetes and Slurm accept: at most `_LONGEST_NAME` lower-case letters, digits, dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_NAME].strip("-") or "model"


TORCHRUN = Target(
    name="torchrun",
    software="torchrun of torch 2.13",
    summary="train.sh: starts the plan on each host",
    write=_write_torchrun,
    weights="steelyard's --init reads a Hugging Face folder, --export-hf writes one",
    starts_steelyard=True,
)
SLURM = replace(
    TORCHRUN,
    name="slurm",
    starts_all_hosts=True,
    software="Slurm's sbatch",
    summary="train.sbatch: starts the plan on the nodes of a job",
    write=_write_slurm,
)
KUBEFLOW = replace(
    TORCHRUN,
    name="kubeflow",
    starts_all_hosts=True,
    software="Kubeflow Trainer v2 (TrainJob)",
    summary="trainjob.yaml: the plan as a ConfigMap and a job that runs it (needs --image)",
    write=partial(_write_kubeflow, "trainjob.yaml", _trainjob),
)
KUBEFLOW_V1 = replace(
    KUBEFLOW,
    name="kubeflow-v1",
    software="Kubeflow's training operator v1 (PyTorchJob)",
    summary="pytorchjob.yaml: the same plan for the training operator v1",
    write=partial(_write_kubeflow, "pytorchjob.yaml", _pytorchjob),
)
