"""Asks Megatron-Bridge: standard input has questions as JSON, the last line of standard output the estimates.

Only its module of memory formulas is read: two of its imports, a class for annotations and the padding of vocabularies,
are put in place, since the package itself needs GPUs' libraries.
"""

import importlib.util
import json
import sys
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace

from torch.nn.functional import gelu, silu


def formulas():
    """The package's module `theoretical_memory_utils`."""
    for name, content in (
        ("megatron.bridge.training.config", {"ConfigContainer": object}),
        ("megatron.bridge.utils.vocab_utils", {"calculate_padded_vocab_size": None}),
    ):
        module = ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
    path = distribution("megatron-bridge").locate_file("megatron/bridge/training/utils/theoretical_memory_utils.py")
    spec = importlib.util.spec_from_file_location("theoretical_memory_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FORMULAS = formulas()
ENGINES = ("megatron", "nemo")


def estimate(asked):
    """Bytes of states, and peak bytes where it states activations; None where a run is not in its scope."""
    if asked["class"] != "dense 16-bit" or asked["zero"] > 1 or not asked["framework"].startswith(ENGINES):
        return None
    config = SimpleNamespace(
        model=SimpleNamespace(
            kv_channels=asked["head_dim"],
            num_attention_heads=asked["heads"],
            hidden_size=asked["hidden"],
            num_query_groups=asked["kv_heads"],
            num_moe_experts=None,
            gated_linear_unit=asked["gated"],
            activation_func=silu if asked["gated"] else gelu,
            num_layers=asked["layers"],
            ffn_hidden_size=asked["ffn"],
            share_embeddings_and_output_weights=asked["tied"],
            pipeline_model_parallel_size=asked["pp"],
            tensor_model_parallel_size=asked["tp"],
            virtual_pipeline_model_parallel_size=asked["vpp"] if asked["vpp"] > 1 else None,
            seq_length=asked["seq_len"],
            vocab_size=asked["vocab"],
            should_pad_vocab=False,
        ),
        optimizer=SimpleNamespace(use_distributed_optimizer=asked["zero"] == 1),
        train=SimpleNamespace(micro_batch_size=asked["mbs"]),
        data_parallel_size=asked["dp"],
    )
    states = FORMULAS.compute_weight_and_optimizer_memory(config)
    if asked["remat"] != "selective" or not (asked["sp"] or asked["tp"] == 1):
        return {"states_bytes": states}
    activations = FORMULAS.compute_activation_memory(config, num_microbatches=asked["microbatches"])
    return {"states_bytes": states, "peak_bytes": states + activations}


answers = {each["id"]: estimate(each) for each in json.load(sys.stdin)}
print(json.dumps({name: answer for name, answer in answers.items() if answer is not None}))
