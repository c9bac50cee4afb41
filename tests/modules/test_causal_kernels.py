"""Tests of attention of the last positions of a prefix, forward and backward, against PyTorch's."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from steelyard.modules import causal_kernels
from steelyard.modules.causal_kernels import Gradients, Scores, attend, attend_backward, window_mask

QUERIES, KEYS, HEADS, KV_HEADS, HEAD_SIZE = 8, 24, 4, 2, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
every_type = pytest.mark.parametrize("dtype", TOLERANCE)
every_window = pytest.mark.parametrize("window", [None, 1, 5, 24, 100])
every_size = pytest.mark.parametrize("num_keys", [QUERIES, KEYS])


def tensors(num_keys: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    shapes = (HEADS, QUERIES), (KV_HEADS, num_keys), (KV_HEADS, num_keys), (HEADS, QUERIES)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((2, *shape, HEAD_SIZE), generator=generator).to(DEVICE, dtype) for shape in shapes]


def expected(num_keys: int, dtype: torch.dtype, scores: Scores) -> tuple[Tensor, Gradients]:
    """Reference in fp32, with a mask."""
    *inputs, gradient = (tensor.to(dtype).float() for tensor in tensors(num_keys, dtype))
    for tensor in inputs:
        tensor.requires_grad_()
    mask = window_mask(QUERIES, num_keys, scores.window, torch.device(DEVICE))
    output = scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scores.scale, enable_gqa=True)
    return output.detach(), Gradients(*torch.autograd.grad(output, inputs, gradient))


def compare(num_keys: int, dtype: torch.dtype, window: int | None) -> None:
    scores = Scores(scale=0.3, window=window)
    output, gradients = expected(num_keys, dtype, scores)
    *inputs, gradient = tensors(num_keys, dtype)
    found = attend(*inputs, scores)
    torch.testing.assert_close(found.output.float(), output, rtol=0, atol=TOLERANCE[dtype])
    of_inputs, reach = attend_backward(gradient, *inputs, found, scores)
    assert reach == of_inputs.key.size(2) == of_inputs.value.size(2)
    wanted = gradients.query, gradients.key[:, :, -reach:], gradients.value[:, :, -reach:]
    for mine, theirs in zip(of_inputs, wanted, strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=0, atol=4 * TOLERANCE[dtype])
    assert not gradients.key[:, :, :-reach].any()


@every_type
@every_window
@every_size
def test_output_and_gradients_are_those_of_masked_attention(
    num_keys: int, window: int | None, dtype: torch.dtype
) -> None:
    compare(num_keys, dtype, window)


@pytest.mark.parametrize("window", [1, 5, 24])
def test_so_are_those_of_the_kernel_that_pytorch_chooses(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    def by_torch(*inputs: Tensor | Scores) -> causal_kernels.Attended:
        return causal_kernels.Attended(causal_kernels._by_torch(*inputs), torch.empty(0))

    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, _attended: object, scores: Scores
    ) -> Gradients:
        return causal_kernels._by_torch_backward(gradient, query, key, value, scores)

    monkeypatch.setattr(causal_kernels, "_cpu_forward", by_torch)
    monkeypatch.setattr(causal_kernels, "_cpu_backward", backward)
    compare(KEYS, torch.float32, window)


def test_a_window_reaches_as_far_as_its_first_query_sees() -> None:
    assert Scores(window=5).reach(QUERIES, KEYS) == QUERIES + 4
    assert Scores(window=5).reach(QUERIES, QUERIES) == QUERIES
    assert Scores().reach(QUERIES, KEYS) == KEYS
