"""What must hold before a plan is run; checked by every process before it takes memory."""

from collections.abc import Mapping
from typing import Any

from steelyard.errors import InvalidPlanError, UserError
from steelyard.model.chain import ModelChain
from steelyard.modules.build import hub_config
from steelyard.plan.plan import Plan
from steelyard.runtime.options import TrainOptions


def check_world_size(plan: Plan, world_size: int) -> None:
    """Raises `InvalidPlanError` unless there are as many processes as the plan has ranks."""
    if world_size != plan.num_devices:
        raise InvalidPlanError(
            field="stages.ranks",
            found=f"a plan for {plan.num_devices} processes",
            expected=f"a plan for the {world_size} processes that were started",
            hint=f"start {plan.num_devices} processes, or plan for {world_size} devices",
        )


def check_elastic(options: TrainOptions) -> None:
    """Raises `UserError` for an elastic run without checkpoints, which could only begin anew, and for a pool that is
    named without one."""
    if options.pool is not None and not options.elastic:
        raise UserError(
            field="--pool",
            found=repr(options.pool),
            expected="--elastic with it, and a plan over pools",
            hint="leave --pool out: else ranks are of pools as the plan says, whatever their hosts are",
        )
    if options.elastic and options.checkpoint_dir is None:
        raise UserError(
            field="--elastic",
            found="no --checkpoint-dir",
            expected="a folder for checkpoints, which those that are left go on from",
            hint="add --checkpoint-dir DIR that all hosts see, and --checkpoint-every STEPS",
        )
    if options.elastic and options.checkpoint_every >= options.steps:
        raise UserError(
            field="--elastic",
            found=f"--checkpoint-every {options.checkpoint_every}, no checkpoint before the last of {options.steps}",
            expected="a checkpoint on the way, which those that are left go on from",
            hint="lower --checkpoint-every",
        )


def check_builder(plan: Plan, builder: str | None) -> None:
    """Raises `InvalidPlanError` unless a builder is given where the plan is for a user's own module, and only there."""
    module = plan.chain().split.module
    if bool(module) == (builder is not None):
        return
    raise InvalidPlanError(
        field="--builder",
        found=f"nothing, and a plan for {module}" if module else f"{builder!r}, and a plan for {plan.model.name}",
        expected="the function that builds it: what a plan file holds is never run"
        if module
        else "none: it has a config",
        hint="add --builder FILE.py:FUNCTION, as planned with; the file is run" if module else "leave --builder out",
    )


def check_same_model(config: Any, chain: ModelChain) -> None:
    """Raises `InvalidPlanError` unless a `transformers` config has the sizes of the plan's model; None is no config."""
    if config is None:
        raise InvalidPlanError(
            field="model",
            found="a module without a config, which is no model of transformers",
            expected=f"{chain.name}, a {chain.family.model_type} of transformers, as in the plan",
            hint="plan for your own module: steelyard.find_plan(model, cluster, sample=…) (docs/your-own-model.md)",
        )
    own_type = getattr(config, "model_type", None)  # of some types the class holds the part of text alone
    parts = [each for each in chain.config.values() if isinstance(each, Mapping) and each.get("model_type") == own_type]
    model_type = own_type if parts else chain.family.model_type
    of_layers = getattr(config, "per_layer_attributes", None) or ()  # which a whole config refuses to be asked for
    written = config.to_dict() if of_layers else {}
    made = hub_config(chain)  # of some types what a config gives is not what it is taken for
    sizes = {key: size if key in of_layers else getattr(made, key, size) for key, size in chain.sizes.items()}
    for key, expected in {"model_type": model_type, **sizes}.items():
        found = written.get(key) if key in of_layers else getattr(config, key, None)
        if found != expected:
            raise InvalidPlanError(
                field=f"model.config.{key}",
                found=f"{expected!r} in the plan",
                expected=f"{found!r}, as the model has",
                hint="plan for this model's config, or build the model from the plan's config",
            )
