"""DeepSeek-V3: attention through a latent, a few dense blocks, then blocks with routed experts and a shared one.

Not trained: the bias that balances the choice of experts, which transformers keeps as it is, and the modules that
predict tokens further ahead, which transformers does not build.

Source: DeepSeek-AI 2024 (arXiv 2412.19437); ``models/deepseek_v3`` of transformers 5.
"""

from steelyard.errors import InvalidModelError
from steelyard.model.decoder import DENSE, Keys, config_value, decoder, dense_ffn
from steelyard.model.family import Sizes


def _kind(sizes: Sizes, block: int) -> str:
    return DENSE if block < config_value(sizes, "first_k_dense_replace", 3) else "sparse"


def _ffn(sizes: Sizes, keys: Keys) -> tuple[tuple[str, int], ...]:
    heads = sizes.size(keys.heads)
    if sizes.size("num_key_value_heads", default=heads) != heads:
        raise InvalidModelError(
            field="num_key_value_heads",
            found=str(sizes.config["num_key_value_heads"]),
            expected=f"{heads}, as many as attention heads: the latent serves each of them",
            hint="use the complete config that the model was published with",
        )
    kinds = {_kind(sizes, block) for block in range(sizes.size(keys.blocks))}
    experts = (("experts", sizes.size("n_routed_experts", default=256)),) if "sparse" in kinds else ()
    return experts + (dense_ffn(sizes, keys) if DENSE in kinds else ())


FAMILY = decoder(
    "deepseek_v3",
    keys=Keys(kv_heads=None, head_dim="qk_rope_head_dim", default_head_dim=64),
    kind_of_block=_kind,
    ffn=_ffn,
    no_tp_block="transformers has no plan that divides its latent attention and its shared expert",
)
