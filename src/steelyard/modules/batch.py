"""What samples hold for each task: what the first layer reads, what the head compares with, and a decoder's inputs.

| task                 | the first layer reads           | the head compares with                          |
|----------------------|---------------------------------|-------------------------------------------------|
| causal-lm            | token ids [N, S]                | the next token at every place [N, S]            |
| masked-lm            | token ids [N, S], some hidden   | the hidden tokens [N, S], `IGNORED` elsewhere   |
| seq2seq-lm           | the source's token ids [N, S]   | the target's token ids [N, S]                   |
| speech-seq2seq       | features of sound [N, ...]      | the target's token ids [N, S]                   |
| image-text-to-text   | images [N, C, H, W]             | the next token at every place [N, S], `IGNORED` |
|                      |                                 | at those whose next is a place of the image     |
| image-classification | images [N, C, H, W]             | classes [N]                                     |

The loss is the mean over all labels that are not `IGNORED`. The embedding of a decoder reads the labels moved one place
on, with the config's ``decoder_start_token_id`` (else ``pad_token_id``) in front, or, of some types, their own last
token (a language, or the end). What merges images and text reads them so, too, with the token that
stands for a place of the image in front and where there is no target.
"""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from steelyard.model.chain import ModelChain
from steelyard.model.family import BEGIN_WITH_THE_LAST, Task
from steelyard.model.split import SplitFeatures

IGNORED = -100
"""The label of a place that is no target."""


def decoder_inputs(
    labels_BS: Tensor,  # noqa: N803
    config: PreTrainedConfig,
    features: SplitFeatures | None = None,
) -> Tensor:
    """The token ids [B, S] that a decoder, or what merges images and text, is given to predict ``labels_BS``."""
    if features and features.token is not None:
        token = features.token
        shifted = torch.cat([torch.full_like(labels_BS[:, :1], token), labels_BS[:, :-1]], 1)
        return shifted.masked_fill(shifted == IGNORED, token)
    padding = config.pad_token_id if config.pad_token_id is not None else 0
    labels_BS = labels_BS.masked_fill(labels_BS == IGNORED, padding)  # noqa: N806
    if config.model_type in BEGIN_WITH_THE_LAST:
        last_B1 = labels_BS.ne(padding).sum(1, keepdim=True) - 1  # noqa: N806
        start_B1 = labels_BS.gather(1, last_B1.clamp(min=0))  # noqa: N806
    else:
        starts = (getattr(config, "decoder_start_token_id", None), getattr(_decoder(config), "bos_token_id", None))
        start = next((token for token in starts if token is not None), padding)
        start_B1 = torch.full_like(labels_BS[:, :1], start)  # noqa: N806
    return torch.cat([start_B1, labels_BS[:, :-1]], 1)


def fitting_tokens(labels_BS: Tensor, features: SplitFeatures) -> Tensor:  # noqa: N803
    """Labels [B, S] of which none is the token of a place of the image; before the text there is no target."""
    if features.token is None:
        return labels_BS
    found = labels_BS.masked_fill(labels_BS == features.token, features.token - 1 if features.token else 1)
    found[:, : features.places - 1] = IGNORED
    return found


def _decoder(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of a decoder that has one of its own."""
    part = getattr(config, "decoder", None)
    return part if isinstance(part, PreTrainedConfig) else None


def blank_samples(chain: ModelChain, num_samples: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of zeros of the right shapes: what is counted on fake tensors.

    Of a user's own module the numbers of samples, which stand for what it reads.
    """
    if chain.split.module:
        return torch.zeros(num_samples, dtype=torch.long), torch.zeros(num_samples, dtype=torch.long)
    if chain.family.task is Task.IMAGE_CLASSIFICATION:
        assert chain.image is not None
        return torch.zeros((num_samples, *chain.image)), torch.zeros(num_samples, dtype=torch.long)
    tokens = torch.zeros((num_samples, seq_len), dtype=torch.long)
    if chain.features:
        return torch.zeros((num_samples, *chain.features.shape)), tokens
    return tokens, torch.zeros_like(tokens)


def random_samples(
    chain: ModelChain, num_samples: int, seq_len: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random inputs and labels, on the CPU; of a masked language model about one place in seven is a target."""
    if chain.family.task is Task.IMAGE_CLASSIFICATION:
        assert chain.image is not None
        images = torch.randn((num_samples, *chain.image), generator=generator)
        return images, torch.randint(chain.vocab_size, (num_samples,), generator=generator)
    inputs, labels = torch.randint(chain.vocab_size, (2, num_samples, seq_len), generator=generator)
    if chain.features:
        inputs = torch.randn((num_samples, *chain.features.shape), generator=generator)
        labels = fitting_tokens(labels, chain.features)
    if chain.family.task is Task.MASKED_LM:
        is_target = torch.rand(labels.shape, generator=generator) < 1 / 7
        is_target[:, 0] = True
        labels = labels.masked_fill(~is_target, IGNORED)
    return inputs, labels
