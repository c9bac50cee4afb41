r"""The loss of pairs of an image and its text: every sample of a global batch is compared with all others.

With normalised features $x_i$ of images and $y_j$ of texts, $N$ pairs and logits $z_{ij} = e^s \, y_i \cdot x_j + b$:

$$L = \frac{1}{2N} \sum_i \Big(2 \log \tfrac{1}{e^{z_{ii}}} + \log \sum_j e^{z_{ij}} + \log \sum_j e^{z_{ji}}\Big),
\qquad
L = \frac 1 N \sum_i \Big(\log(1 + e^{-z_{ii}}) + \sum_{j \ne i} \log(1 + e^{z_{ij}})\Big)$$

| symbol | argument      | unit | meaning                                                          |
|--------|---------------|------|------------------------------------------------------------------|
| $s$    | `logit_scale` | 1    | logarithm of the scale, a parameter of the model itself          |
| $b$    | `logit_bias`  | 1    | of the second loss alone, a parameter of the model itself        |

The first is that of CLIP (Radford et al. 2021, figure 3), the second that of SigLIP (Zhai et al. 2023, equation 1). A
rank takes the terms of its own $i$: it gathers the features of all ranks, and has logits of its samples with all. So
their gradients are summed over the ranks and scattered.

Legend of shape suffixes: B samples of this rank, N samples of the global batch, D width of features.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional


@dataclass(slots=True)
class Batch:
    """The global batch of which this rank has some samples: over the ranks of a mesh, or taken to be of so many."""

    mesh: DeviceMesh | None = None
    num_samples: int = 0
    """Where other ranks are not there, as in a trace; 0 for no more than this rank has."""
    gathered_entries: int = 0
    """Of features of all samples, since such a batch was made."""

    def gather(self, local_BD: Tensor) -> Tensor:  # noqa: N803
        """The features [N, D] of all samples."""
        if self.num_samples:
            self.gathered_entries += self.num_samples * local_BD.shape[-1]
            return functional.pad(local_BD, (0, 0, 0, self.num_samples - len(local_BD)))
        if self.mesh is None or self.mesh.size() == 1:
            return local_BD
        found = DTensor.from_local(local_BD, self.mesh, [Shard(0)], run_check=False)
        return found.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def places(self, local_BD: Tensor) -> Tensor:  # noqa: N803
        """Where this rank's samples stand among all [B]."""
        first = len(local_BD) * self.mesh.get_local_rank() if self.mesh else 0
        return torch.arange(first, first + len(local_BD), device=local_BD.device)


def pair_loss(own: nn.Module, images_BD: Tensor, texts_BD: Tensor, batch: Batch) -> Tensor:  # noqa: N803
    """This rank's share of the mean loss; ``own`` has the parameters of the model itself."""
    images_BD, texts_BD = (functional.normalize(each, dim=-1) for each in (images_BD, texts_BD))  # noqa: N806
    places_B, images_ND = batch.places(texts_BD), batch.gather(images_BD)  # noqa: N806
    scale = own.logit_scale.exp()
    logits_BN = texts_BD @ images_ND.t() * scale  # noqa: N806
    bias = getattr(own, "logit_bias", None)
    if bias is not None:
        logits_BN, own_B1 = (logits_BN + bias).float(), places_B.unsqueeze(1)  # noqa: N806
        return functional.softplus(logits_BN.scatter(1, own_B1, -logits_BN.gather(1, own_B1))).sum() / len(images_ND)
    of_images_BN = images_BD @ batch.gather(texts_BD).t() * scale  # noqa: N806
    both = (functional.cross_entropy(each.float(), places_B, reduction="sum") for each in (logits_BN, of_images_BN))
    return sum(both) / (2 * len(images_ND))
