"""Of every type of transformers with a class for causal or masked language modelling: what becomes of it, and why.

Split (the pieces give logits and gradients of the whole model, at small width), traced, and divided by tensor and
sequence parallelism as proved on two ranks. Configs are those that transformers takes for a type where nothing is
given, so a type whose own defaults do not build a model counts as one that does not split.

    python benchmarks/model_types.py                      # every type: about 40 minutes on 2 cores
    python benchmarks/model_types.py --types phi3,opt     # some
"""

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from steelyard.errors import UserError
from steelyard.model.read import chain_from_config
from steelyard.modules.split_proof import split_model
from steelyard.tracer.trace import trace

TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}


def outcome(model_type: str) -> dict[str, Any]:
    """What becomes of a type: ``reason`` is why it does not split or trace, ``tp`` and ``sp`` why blocks do not."""
    started, found = time.process_time(), {"type": model_type, "split": False, "traced": False}
    try:
        config = {"model_type": model_type}
        split = split_model(model_type, config)
        blocks = split.kinds[1:-1]
        found |= {
            "split": True,
            "tp": sorted({kind.no_tp for kind in blocks} - {""}),
            "sp": sorted({kind.no_tp or kind.no_sp for kind in blocks} - {""}),
        }
        trace(chain_from_config(config, name=model_type, split=split), seq_len=128, precision="bf16", degrees=(1,))
        found["traced"] = True
    except UserError as error:
        found["reason"] = error.found
    except Exception as error:  # what transformers raises for a type's own defaults is of every kind
        found["reason"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    return found | {"cpu_s": round(time.process_time() - started, 1)}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Counts, then every miss with its reason."""
    counts = Counter[str]()
    for row in rows:
        counts.update(key for key in ("split", "traced") if row[key])
        counts.update(key for key in ("tp", "sp") if row["split"] and not row[key])
    yield f"{len(rows)} types: " + ", ".join(
        f"{key} {counts[key]} ({counts[key] / len(rows):.0%})" for key in ("split", "traced", "tp", "sp")
    )
    for row in rows:
        if "reason" in row:
            yield f"  {row['type']}: {row['reason']}"
        elif row["tp"]:
            yield f"  {row['type']}: no tp: {row['tp'][0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", help="separated by commas; all where left out")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = options.types.split(",") if options.types else None
    for task, names in TASKS.items():
        types = [name for name in names if name in CONFIG_MAPPING and (chosen is None or name in chosen)]
        rows = [outcome(name) for name in types]
        print(
            json.dumps({task: rows}) if options.as_json else "\n".join([task, *table(rows)]) if rows else "", flush=True
        )


if __name__ == "__main__":
    main()
