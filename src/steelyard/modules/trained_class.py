"""Which class of transformers is trained for a config, and for what task."""

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from steelyard.errors import InvalidModelError
from steelyard.model.family import Task
from steelyard.model.split import TEXT_PART
from steelyard.modules.build import auto_class_of
from steelyard.modules.not_split import not_split

_SPLIT_TASKS = tuple(task for task in Task if task is not Task.OWN)


def task_of(config: PreTrainedConfig) -> Task:
    """What the model is trained for: as its config's architecture says, else the first task that its type has.

    One that says it is no decoder sees what follows a token, so that it fills in masked ones.
    """
    named = (getattr(config, "architectures", None) or [""])[0]
    of_transformers = sorted(
        (task for task in Task if task is not Task.OWN), key=lambda task: task is not Task.SEQ2SEQ_LM
    )  # some classes with an encoder are listed for masked models, too
    of_transformers = [task for task in of_transformers if not task.has_decoder or config.is_encoder_decoder]
    tasks = sorted((task for task in of_transformers if _classes(config, task)), key=_SPLIT_TASKS.__contains__)
    for task in tasks:
        if named in {each.__name__ for each in _classes(config, task)}:
            if task in _SPLIT_TASKS:
                return task
            raise not_split(config, f"{named}, of a task whose models do not split by their structure")
    tasks = [task for task in Task if task in tasks and task in _SPLIT_TASKS]
    if not tasks:
        raise not_split(
            config,
            "no class of transformers for text (causal, masked, encoder and decoder), speech to text, images with text "
            "or classes of images",
        )
    bare = {each.__name__ for each in _listed(config, transformers.AutoModel)}  # which say nothing of the task
    if named and named not in bare:
        classes = [each.__name__ for task in tasks for each in _classes(config, task)]
        raise InvalidModelError(
            field="architectures",
            found=f"{named}, of another task",
            expected=f"for a {config.model_type}: {', '.join(dict.fromkeys(classes))}",
            hint="name the class that is trained, or leave architectures out for the first",
        )
    is_encoder = getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
    return Task.MASKED_LM if is_encoder and Task.MASKED_LM in tasks else tasks[0]


def has_fused_attention(config: PreTrainedConfig, task: Task) -> bool:
    """Whether attention may run in one kernel, through the registry of transformers: some read it and do not say so."""
    model = _classes(config, task)[0]
    return bool(model._supports_sdpa and (model._supports_attention_backend or model._can_set_attn_implementation()))


def text_of(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of the text of a model of several parts, if its task has a class for that, too."""
    text = getattr(config, TEXT_PART, None)
    return text if isinstance(text, PreTrainedConfig) and auto_class_of(text, task_of(config)) else None


def _classes(config: PreTrainedConfig, task: Task) -> tuple[type[PreTrainedModel], ...]:
    """The classes of transformers for a config and a task."""
    return _listed(config, auto_class_of(config, task))


def _listed(config: PreTrainedConfig, auto_class: Any) -> tuple[type[PreTrainedModel], ...]:
    classes = auto_class._model_mapping.get(type(config), ()) if auto_class else ()
    return classes if isinstance(classes, tuple) else (classes,)
