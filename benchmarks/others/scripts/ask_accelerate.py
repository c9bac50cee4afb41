"""Asks accelerate: standard input has questions as JSON, the last line of standard output the estimates."""

import json
import sys
from functools import cache

from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig


@cache
def training_bytes(gated, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq_len, tied):
    """The figure "Training w/ Adam" of `accelerate estimate-memory` for bfloat16, in bytes."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": seq_len,
        "tie_word_embeddings": tied,
    }
    llama = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = LlamaConfig(**sizes, **llama) if gated else GPTNeoXConfig(**sizes)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    total, _ = calculate_maximum_sizes(model.float())
    return max(estimate_training_usage(total, "bfloat16").values())


NAMES = ("gated", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq_len", "tied")
answers = {}
for asked in json.load(sys.stdin):
    one_copy = asked["zero"] == 0 and all(asked[name] == 1 for name in ("tp", "pp", "cp", "ep"))
    if one_copy and asked["class"] == "dense 16-bit":
        answers[asked["id"]] = {"states_bytes": training_bytes(*(asked[name] for name in NAMES))}
print()
print(json.dumps(answers))
