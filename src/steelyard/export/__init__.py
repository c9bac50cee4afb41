"""A plan in other frameworks' own configuration, each file opening with what was carried over and what was not.

| module         | targets                                                                    |
|----------------|----------------------------------------------------------------------------|
| `target`       | what a target is; a plan of one strategy in words that frameworks share    |
| `torchtitan`   | torchtitan                                                                 |
| `megatron`     | megatron, megatron-fsdp                                                    |
| `hugging_face` | accelerate, transformers                                                   |
| `deepspeed`    | deepspeed                                                                  |
| `pytorch`      | pytorch: a script of stock calls, copied from `scripts`, and what it reads |
| `launch`       | torchrun, slurm, kubeflow                                                  |

What a target can express is data (`steelyard.plan.capabilities`); finding the best plan within it is the planner's
work.
"""

from steelyard.errors import UserError, nearest
from steelyard.export import deepspeed, hugging_face, launch, megatron, pytorch, torchtitan
from steelyard.export.target import Export, Request, Target, check_model, describe_uniform, export_plan

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        torchtitan.TARGET,
        megatron.TARGET,
        megatron.SHARDED_TARGET,
        hugging_face.ACCELERATE,
        hugging_face.TRANSFORMERS,
        deepspeed.TARGET,
        pytorch.TARGET,
        launch.TORCHRUN,
        launch.SLURM,
        launch.KUBEFLOW,
    )
}


def target_of(name: str) -> Target:
    """The target of a name; raises `UserError` for one that is not known."""
    if name not in TARGETS:
        raise UserError(
            field="--to",
            found=repr(name),
            expected="one of " + ", ".join(TARGETS) + ", or list",
            hint=nearest(name, TARGETS),
        )
    return TARGETS[name]


__all__ = ["TARGETS", "Export", "Request", "Target", "check_model", "describe_uniform", "export_plan", "target_of"]
