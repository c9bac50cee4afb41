"""Which layers of a split model may be tensor-, sequence- and context-parallel: proved, or the reason why not."""

from collections.abc import Callable, Collection, Mapping

from transformers import PreTrainedModel

from steelyard.model.family import NO_CP, LayerRole, Task
from steelyard.model.split import ModelSplit, SplitLayerType
from steelyard.modules.called import POSITIONS
from steelyard.modules.split_tp import Styles, follows, suppositions, unread_plan
from steelyard.modules.two_ranks import ThreadedProof

IMAGE_NO_SP = "the places of an image are not divided"


ENCODER_NO_SP = "two sequences flow along the decoder"


LENGTH_NO_SP = "its states are of another length than the samples"


STREAM_NO_SP = "what its blocks share is not divided by tokens"


POSITIONS_NO_SP = "learned positions are added to whole sequences"


def divided_types(
    model: PreTrainedModel,
    split: ModelSplit,
    keywords: Mapping[str, str | None],
    prove: Callable[[Mapping[str, Styles], bool], str],
) -> tuple[SplitLayerType, ...]:
    """The layer types with their proved styles, or the reason why there are none.

    ``keywords`` says by what name modules are given their tensor, by their path in the model; ``prove`` returns why
    styles by layer type, with or without sequence parallelism, do not hold, an empty text where they do.
    """
    found: dict[str, SplitLayerType] = {}
    for number, layer_type in enumerate(split.kinds):
        layer = split.layers.index(number)
        is_block = layer_type.role is LayerRole.BLOCK
        unread = unread_plan(model, split, layer, keywords) if is_block else ""
        reasons, of_own_plan = [unread] if unread else [], list[str]()
        for styles in suppositions(model, split, layer_type, layer, keywords):
            reason = prove({layer_type.name: styles}, False)
            is_own = is_block and follows(styles, model, split, layer, keywords)
            if not reason:
                known = _no_sp(split, layer_type)
                no_sp = known or prove({layer_type.name: styles}, True)
                found[layer_type.name] = layer_type.model_copy(
                    update={
                        "styles": dict(styles),
                        "no_tp": "",
                        "no_sp": known or (f"not proved: {no_sp}" if no_sp else ""),
                        "unread_plan": unread or _unproved_plan([] if is_own else of_own_plan),
                    }
                )
                break
            reasons.append(reason)
            of_own_plan += [reason] if is_own else []
        else:
            why = "; ".join(dict.fromkeys(reasons)) or "no way is known to divide its modules"
            found[layer_type.name] = layer_type.model_copy(update={"no_tp": why})
    return tuple(found[layer_type.name] for layer_type in split.kinds)


def _unproved_plan(reasons: Collection[str]) -> str:
    """Why the model's own plan is not taken though it was tried, from the reasons of all ways to read it."""
    found = "; ".join(dict.fromkeys(reasons))
    return f"its own tp plan is not proved on two ranks: {found}" if found else ""


def shares_heads(layer_type: SplitLayerType, one_head: "ThreadedProof") -> bool:
    """Whether ranks of which there are more than key-value heads may have the same; ``one_head`` is of such a model."""
    return (
        layer_type.role is LayerRole.BLOCK
        and bool(layer_type.styles)
        and not one_head({layer_type.name: layer_type.styles}, False)
    )


def no_context_parallelism(split: ModelSplit, proof: "ThreadedProof") -> dict[str, str]:
    """For every layer type why ranks may not compute its layers for their own tokens each; empty where that is
    proved."""
    known = {layer_type.name: no_cp(split, layer_type) for layer_type in split.kinds}
    tried = [name for name, reason in known.items() if not reason]
    together = proof.by_tokens(tried) if tried else ""
    reasons = {name: proof.by_tokens([name]) for name in tried if together}
    return known | {name: f"not proved: {reason}" for name, reason in reasons.items() if reason}


def no_cp(split: ModelSplit, layer_type: SplitLayerType, *, attention_drops: bool = False) -> str:
    """Why no layer of a type can be under cp; empty where that is to be tried."""
    if split.task is not Task.CAUSAL_LM:
        return NO_CP
    if others := _other_attention(split, layer_type):
        return f"{NO_CP}, and its blocks are of {others}"
    return _undivided_by_tokens(split, attention_drops=attention_drops)


def _undivided_by_tokens(split: ModelSplit, *, attention_drops: bool) -> str:
    """Why no layer of a causal model with attention can be under cp; empty where that is to be tried."""
    if not split.fused_attention:
        return "its attention runs step by step, with a mask of the whole sequence"
    if any(layer_type.tokens != (1, 0) for layer_type in split.kinds):
        return LENGTH_NO_SP
    if split.streams:
        return STREAM_NO_SP
    if attention_drops:
        return "attention drops entries at random, which ranks with parts of a sequence cannot do alike"
    return ""


def _other_attention(split: ModelSplit, layer_type: SplitLayerType) -> str:
    """What blocks do in the place of causal attention, as a recurrence: those of a type, or all of them; else empty."""
    blocks = [each for each in split.kinds if each.role is LayerRole.BLOCK]
    found = {each.attention for each in ([layer_type] if layer_type.role is LayerRole.BLOCK else blocks)}
    return ", ".join(sorted(found)) if found.isdisjoint(("full_attention", "sliding_attention")) else ""


def _no_sp(split: ModelSplit, layer_type: SplitLayerType) -> str:
    """Why nothing of a layer type can be sequence-parallel; empty where that is to be tried."""
    if layer_type.role is LayerRole.EMBEDDING and any(step.startswith(POSITIONS) for step in split.embedding_calls):
        return POSITIONS_NO_SP
    known = IMAGE_NO_SP if split.image else ENCODER_NO_SP if split.encoder else ""
    if split.encoder and split.encoder.encoded is None:
        known = IMAGE_NO_SP
    if any(layer_type.tokens != (1, 0) for layer_type in split.kinds):
        known = known or LENGTH_NO_SP
    by_tokens = all(each.shape[0] == 0 and not each.whole for each in split.streams)
    return known or ("" if by_tokens else STREAM_NO_SP)
