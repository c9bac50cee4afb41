"""Models of every family in one process, as a chain of layers and as transformers runs them."""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from steelyard.model.chain import ModelChain
from steelyard.model.family import Task
from steelyard.model.read import chain_from_config
from steelyard.modules.build import prepare_model
from steelyard.modules.layers import Flow, LayerContext, build_layer, shared_inputs_of, tensors_of
from steelyard.modules.model_inputs import IGNORED, decoder_inputs
from steelyard.plan.strategy import Remat
from tests.runtime.models import FAMILY_CONFIGS


def chain_of(name: str) -> ModelChain:
    return chain_from_config(FAMILY_CONFIGS[name], name=name)


def length_of(chain: ModelChain) -> int:
    return 16 if chain.family.task.reads_text else chain.max_seq_len


def loss_of_model(model: PreTrainedModel, chain: ModelChain, inputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of the unmodified model."""
    if chain.family.task is Task.CAUSAL_LM:
        return functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
    return model(**{model.main_input_name: inputs}, labels=labels).loss


def loss_of_chain(model: PreTrainedModel, chain: ModelChain, inputs: Tensor, labels: Tensor) -> Tensor:
    """The loss that the layers of the chain compute, one after the other; takes the model apart."""
    prepare_model(model, chain)
    layers = [build_layer(model, chain, layer, Remat.NONE) for layer in range(chain.num_layers)]
    side = shared_inputs_of(layers, model, chain, torch.device("cpu"))
    context = LayerContext(
        side=side(length_of(chain), torch.float32, torch.device("cpu")),
        labels_BS=labels,
        num_targets=int((labels != IGNORED).sum()),
        decoder_ids=decoder_inputs(labels, model.config) if labels.dim() > 1 else None,
    )
    flow: Flow = inputs
    for number, layer in enumerate(layers):
        flow = layer(flow, context)
        if number < chain.num_layers - 1:
            shapes = [tuple(each.shape[1:]) for each in tensors_of(flow)]
            assert shapes == [chain.hidden_shape(number, length_of(chain))] * chain.type_of(number).num_streams
    assert isinstance(flow, Tensor)
    return flow
