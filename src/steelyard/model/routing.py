r"""To how many places a token goes, where those who send it send it once to each place that has experts of it.

A place is a rank or a node. With the experts in order over $r$ places, each as likely as another, the $t$ experts of a
token are on

$$r\,\Big(1 - \big(1 - \tfrac{1}{r}\big)^t\Big)$$

of them. A router that first chooses $g$ of $G$ groups of experts (node-limited routing) leaves, where a place has
$c = G/r$ groups,

$$r \sum_j \frac{\binom{c}{j}\binom{G-c}{g-j}}{\binom{G}{g}}\, \Big(1 - \big(1 - \tfrac{j}{g}\big)^t\Big)$$

and where a group lies on several places the first with their $rg/G$. Groups that are not whole on places or places on
groups count as none.

Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.1.2. Not modelled: that experts of a token differ, which makes
the places a few percent more where experts are few.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

from steelyard.errors import InvalidModelError

TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_top_k", "num_experts_per_token", "top_k_experts", "moe_topk")
"""Keys of configs that count the experts of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Experts of a token, and from how many of the groups of experts they come."""

    top_k: int
    num_groups: int = 1
    chosen_groups: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Routing":
        """As a config says; raises `InvalidModelError` where it does not say how many experts a token has."""
        top_k = next((config[key] for key in TOP_K_KEYS if isinstance(config.get(key), int)), None)
        if top_k is None:
            raise InvalidModelError(
                field="config.json",
                found="no number of experts of a token",
                expected="one of " + ", ".join(TOP_K_KEYS),
                hint="give it, or price an exchange that sends a token to each of its experts",
            )
        groups = config.get("n_group") or 1
        return cls(top_k=top_k, num_groups=groups, chosen_groups=config.get("topk_group") or groups)

    def places(self, count: int) -> float:
        """Of so many places, those that a token goes to on average."""
        groups, chosen = self.num_groups, self.chosen_groups
        if groups % count == 0:
            each = groups // count
            of_place = ((j, comb(each, j) * comb(groups - each, chosen - j)) for j in range(min(each, chosen) + 1))
            reached = sum(ways * (1 - (1 - j / chosen) ** self.top_k) for j, ways in of_place)
            return count * reached / comb(groups, chosen)
        open_places = count * chosen / groups if count % groups == 0 else count
        return open_places * (1 - (1 - 1 / open_places) ** self.top_k)
