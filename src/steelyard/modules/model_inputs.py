"""Inputs of a Transformers model: samples and labels, and the options of its forward pass.

| task                 | the first layer reads           | the head compares with                          |
|----------------------|---------------------------------|-------------------------------------------------|
| causal-lm            | token ids [B, S]                | the next token at every place [B, S]            |
| masked-lm            | token ids [B, S], some masked   | the masked tokens [B, S], `IGNORED` elsewhere   |
| seq2seq-lm           | the source's token ids [B, S]   | the target's token ids [B, S]                   |
| speech-seq2seq       | audio features [B, ...]         | the target's token ids [B, S]                   |
| image-text-to-text   | images [B, C, H, W]             | the next token at every place [B, S], `IGNORED` |
|                      |                                 | if the next place belongs to the image          |
| image-classification | images [B, C, H, W]             | classes [B]                                     |

The loss is the mean over all labels that are not `IGNORED`. The embedding of a decoder reads the labels shifted by one
place. The first token is the config's ``decoder_start_token_id`` (else ``pad_token_id``) or, for some model types, the
last token of the labels (a language, or the end). A model that merges images and text reads shifted labels, too; there
the token of an image place comes first and replaces `IGNORED`.

All samples have features of one shape, which the config gives. Each audio model type is listed here because structure
does not tell its features. Audio without a length in the config has `_SOUND` values, 30 seconds at 16 kHz. Images that
a model reads as patches of a grid have the size ``vision_config.image_size``, which `plan` sets. Unless a pass is given
a mask of padding or positions that begin anew (`PER_SAMPLE`), each sample is one sequence without padding, so a forward
pass need not read values of samples (`one_sequence_each`).

Legend of shapes: B samples, S tokens, C channels, H height, W width.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from steelyard.errors import InvalidModelError
from steelyard.model.chain import ModelChain
from steelyard.model.family import BEGIN_WITH_THE_LAST, ROUTER_LOSS, Task
from steelyard.model.split import ModelSplit, SplitFeatures
from steelyard.modules.known_values import is_known, known_of
from steelyard.modules.not_split import failed_at

IGNORED = -100
"""Label of a place without a target."""


def decoder_inputs(
    labels_BS: Tensor,  # noqa: N803
    config: PreTrainedConfig,
    features: SplitFeatures | None = None,
) -> Tensor:
    """Return the token ids [B, S] from which a decoder or an image-text model predicts ``labels_BS``."""
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
        part = getattr(config, "decoder", None)
        starts = (
            getattr(config, "decoder_start_token_id", None),
            getattr(part if isinstance(part, PreTrainedConfig) else None, "bos_token_id", None),
        )
        start = next((token for token in starts if token is not None), padding)
        start_B1 = torch.full_like(labels_BS[:, :1], start)  # noqa: N806
    return torch.cat([start_B1, labels_BS[:, :-1]], 1)


def fitting_tokens(labels_BS: Tensor, features: SplitFeatures) -> Tensor:  # noqa: N803
    """Replace image tokens in labels [B, S] by another token; places before the text have no target."""
    if features.token is None:
        return labels_BS
    found = labels_BS.masked_fill(labels_BS == features.token, features.token - 1 if features.token else 1)
    found[:, : features.places - 1] = IGNORED
    return found


def blank_samples(chain: ModelChain, num_samples: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of zeros in the right shapes, for counting on fake tensors.

    The inputs of a user's own module are replaced by one number per sample.
    """
    of_labels = (num_samples, seq_len) if chain.family.task.reads_text else (num_samples,)
    labels = torch.zeros(of_labels, dtype=torch.long)
    read = chain.features or chain.image
    return (blank(read, num_samples, seq_len, labels.device) if read else torch.zeros_like(labels)), labels


def random_samples(
    chain: ModelChain, num_samples: int, seq_len: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random inputs and labels on the CPU; in masked language models about one place in seven is a target."""
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


_SOUND = 30 * 16_000
_CHANNELS = ("in_channels", "num_channels", "in_chans")
_UNFLATTENED = ("paddleocr_vl",)
"""Model types that read patches with channels, rows and columns instead of flattened patches."""
_FEATURES: Mapping[str, Callable[[Any], tuple[str, tuple[int, ...]]]] = {
    "moonshine": lambda _config: ("input_values", (_SOUND,)),
    "speech_to_text": lambda config: ("input_features", (config.max_source_positions, config.input_feat_per_channel)),
    "whisper": lambda config: ("input_features", (config.num_mel_bins, 2 * config.max_source_positions)),
}
"""Name and shape of the audio features of each model type, such as mel bins × frames (two frames make one place)."""


def features_of(model: PreTrainedModel, task: Task) -> SplitFeatures:
    """Return the features that a model's first layer reads; raises `InvalidModelError` if they are unknown."""
    config = model.config
    if task is Task.IMAGE_TEXT:
        return _image_and_places(model)
    known = _FEATURES.get(config.model_type)
    if known is None:
        raise _unknown(config, f"the shape of its audio features (known only for {', '.join(_FEATURES)})")
    name, shape = known(config)
    return SplitFeatures(name=name, shape=shape)


def _image_and_places(model: PreTrainedModel) -> SplitFeatures:
    """Return the features of one image of the configured size, and its number of places among the tokens."""
    config = model.config
    vision = getattr(config, "vision_config", None)
    if "image_grid_thw" in inspect.signature(type(model).forward).parameters:
        return _patches(config, vision)
    sides, token = _sides(getattr(vision, "image_size", None)), getattr(config, "image_token_id", None)
    if len(sides) != 2 or not isinstance(token, int):
        raise _unknown(config, "the size of its images (its config lacks vision_config.image_size or image_token_id)")
    shape = (getattr(vision, "num_channels", 3), *sides)
    try:
        with torch.no_grad():
            made = model.get_image_features(pixel_values=torch.zeros((1, *shape), device="meta"))
        found = getattr(made, "pooler_output", made)
        places = sum(each.shape[-2] for each in found)
    except Exception as error:
        words = " ".join(str(error).split())[:120] + failed_at(error)
        raise _unknown(
            config, f"the size of its images (the model rejects one of {' × '.join(map(str, shape))}: {words})"
        ) from error
    return SplitFeatures(name="pixel_values", shape=shape, token=token, places=places)


def _sides(size: Any) -> tuple[int, ...]:
    """Height and width of an image from a config value; empty if the config has none."""
    return (size, size) if isinstance(size, int) else tuple(size or ())


def _patches(config: Any, vision: Any) -> SplitFeatures:
    """Return the features of one image as patches; the model merges squares of patches into places of the text."""
    patch, merge = vision.patch_size, getattr(vision, "spatial_merge_size", 1)
    channels = next((getattr(vision, key) for key in _CHANNELS if hasattr(vision, key)), 3)
    sides = _sides(getattr(vision, "image_size", None))
    if not isinstance(patch, int) or not isinstance(merge, int):
        raise _unknown(config, f"the size of its patches (patch_size {patch}, spatial_merge_size {merge})")
    if len(sides) != 2 or any(side <= 0 or side % (patch * merge) for side in sides):
        raise InvalidModelError(
            field="image_size",
            found=f"{' × '.join(map(str, sides)) or 'none'} for {config.model_type}, which reads images of any size",
            expected=f"one size for all images, with sides that are multiples of {patch * merge} (patch_size × "
            "spatial_merge_size)",
            hint=f"pass --image-size {16 * patch * merge} (none: its text alone), or write vision_config.image_size "
            "into config.json",
        )
    rows, columns = (side // patch for side in sides)
    frames = getattr(vision, "temporal_patch_size", 1)
    of_patch = (channels, patch, patch) if config.model_type in _UNFLATTENED else (channels * frames * patch * patch,)
    return SplitFeatures(
        name="pixel_values",
        shape=(rows * columns, *of_patch),
        token=config.image_token_id,
        places=rows * columns // merge**2,
        grid=(1, rows, columns),
    )


class UnknownInputError(InvalidModelError):
    """A model whose config does not give the size of its images or sound."""


def _unknown(config: PreTrainedConfig, of: str) -> UnknownInputError:
    return UnknownInputError(
        field="model_type",
        found=f"{config.model_type}, without {of}",
        expected="a model whose config defines the size of its inputs",
        hint="write a function that builds it, with a sample: docs/how-to/your-own-model.md",
    )


NO_MASK = "flash_attention_2"
"""Attention implementation that reads no mask for plain sequences, so that no unused mask is built."""


PER_SAMPLE = ("attention_mask", "position_ids")
"""Arguments of forward passes, [B, S], that differ between samples: 0 for padding, and places within a sequence."""


@contextmanager
def one_sequence_each(*, reads_values: bool = False) -> Iterator[None]:
    """Run Transformers forward passes that read no values of samples, because the answers are known.

    The passes do not search for packed sequences because each sample is one sequence, nor for padding because there is
    none; with ``reads_values`` they do. They do not draw whether to skip a block because all blocks of a plan run.
    Several threads may use this context at the same time.
    """
    global _num_within  # noqa: PLW0603  the replaced functions are global, too
    with _within_lock:
        if not _num_within:
            for each in _REPLACED:
                each.start()
        _num_within += 1
    before, _thread.reads_values = getattr(_thread, "reads_values", False), reads_values
    try:
        yield
    finally:
        _thread.reads_values = before
        with _within_lock:
            _num_within -= 1
            if not _num_within:
                for each in _REPLACED:
                    each.stop()


def _draw(*size: Any, **options: Any) -> Any:
    return 1.0 if size == ([],) else _rand(*size, **options)


def _nothing(*_places: Any, **_names: Any) -> None:
    """Do nothing: replaces functions without effect on unpadded samples; a mock would keep its arguments."""


def _without_values(name: str, replacement: Callable[..., Any]) -> Any:
    """Return a patch of a function of ``masking_utils`` for the passes of a thread that read no values."""
    own = getattr(masking_utils, name)

    def chosen(*places: Any, **names: Any) -> Any:
        return (own if _thread.reads_values else replacement)(*places, **names)

    return mock.patch.object(masking_utils, name, chosen)


def _is_plain_causal(
    padding: Tensor | None, queries: int, keys: int, first_query: int, first_key: int, window: int | None = None
) -> bool:
    """Return whether attention needs no mask: as in transformers, and also if a window is as long as the sequence."""
    return _needs_no_mask(padding, queries, keys, first_query, first_key, None if window is None else window + 1)


def _listed(tensor: FakeTensor) -> Any:
    """Return the known values of a fake tensor as a list; `FakeTensor.tolist` reads one entry after the other."""
    return known_of(tensor).tolist() if is_known(tensor) else _to_list(tensor)


_rand, _needs_no_mask = torch.rand, masking_utils._ignore_causal_mask_sdpa
_to_list = FakeTensor.tolist
_num_within, _within_lock, _thread = 0, threading.Lock(), threading.local()
_REPLACED = (
    mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", _nothing),
    _without_values("prepare_padding_mask", _nothing),
    mock.patch.dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {NO_MASK: _nothing}),
    _without_values("find_packed_sequence_indices", _nothing),
    _without_values("_ignore_causal_mask_sdpa", _is_plain_causal),
    mock.patch.object(torch, "rand", _draw),
    mock.patch.object(FakeTensor, "tolist", _listed),
)
Read = tuple[int, int, int] | SplitFeatures | None
"""Input of the first layer: an image shape, features, or None for token ids."""


def read_by(split: ModelSplit) -> Read:
    """Return the input of a model's first layer."""
    return split.features or split.image


def ids_beside(task: Task) -> str:
    """Return the argument name of the token ids that the first layer does not read; empty if there are none."""
    return "decoder_input_ids" if task.has_decoder else "input_ids" if task.has_two_lists else ""


def first_tokens(read: Read) -> tuple[int | None, int]:
    """Return the image token that begins a sample, None without one, and the number of its places."""
    return (read.token, read.places) if isinstance(read, SplitFeatures) else (None, 0)


def given_samples(read: Read, samples: Tensor | None) -> dict[str, Tensor]:
    """Return the first layer's input by argument name: token ids, images, or features [B, ...]."""
    if samples is None:
        return {}
    if isinstance(read, SplitFeatures):
        return {read.name: samples.flatten(0, 1) if read.grid else samples}
    return {"pixel_values" if read else "input_ids": samples}


def beside_features(model: nn.Module, read: Read, ids: Tensor | None) -> dict[str, Tensor]:
    """Return the arguments in addition to patches: the grid of each image, and the token ids [B, S] that are its
    places."""
    if not isinstance(read, SplitFeatures) or read.grid is None:
        return {}
    assert ids is not None
    types = torch.zeros(ids.shape, dtype=torch.int, device=ids.device)
    types[:, : read.places] = 1
    found = {"image_grid_thw": torch.tensor([read.grid] * len(ids), device=ids.device), "mm_token_type_ids": types}
    known = inspect.signature(type(model).forward).parameters
    return {name: each for name, each in found.items() if name in known}


def blank(read: Read, samples: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Build the first layer's input of zeros: token ids [B, S], images [B, C, H, W], or features, both of ``dtype``."""
    if read:
        shape = read.shape if isinstance(read, SplitFeatures) else read
        return torch.zeros((samples, *shape), dtype=dtype, device=device)
    return torch.zeros((samples, tokens), dtype=torch.long, device=device)


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Return the options of the model's forward pass: no cache, and no router logits."""
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    configs = (model.config, model.config.get_text_config(decoder=True))
    known = "use_cache" in parameters or (takes_any and any(hasattr(each, "use_cache") for each in configs))
    told = {"use_cache": known, ROUTER_LOSS: ROUTER_LOSS in parameters}
    return {name: False for name, is_known in told.items() if is_known}
