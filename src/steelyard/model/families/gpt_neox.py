"""GPT-NeoX and Pythia: layer norms with biases, attention and feed-forward part side by side.

Source: ``models/gpt_neox`` of transformers 5.
"""

from steelyard.model.decoder import Keys, decoder

FAMILY = decoder(
    "gpt_neox",
    keys=Keys(kv_heads=None),
    body="gpt_neox",
    embedding="embed_in",
    final_norm="final_layer_norm",
    block_tp={
        "attention": "gather",
        "mlp": "gather",
        "input_layernorm": "sequence",
        "post_attention_layernorm": "sequence",
    },
)
