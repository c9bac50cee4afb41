"""Precisions by name: those of all layers, and those of linear layers alone.

Parameters, reduced gradients and optimizer states are fp32 in all of them. fp16 ends at 65,504 and loses values below
6e-8, so it is trained with loss scaling.
"""

from collections.abc import Mapping
from typing import Literal

LayerPrecision = Literal["bf16", "fp16", "fp32"]
"""Precision in which layers compute, except linear layers in fewer bits."""
Precision = Literal["bf16", "fp16", "fp32", "fp8", "fp8-block", "mxfp8", "nvfp4"]
DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's name of the compute dtype of each `LayerPrecision`."""
SCALES_LOSS: Precision = "fp16"
"""Precision that is trained with loss scaling."""
