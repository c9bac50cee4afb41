"""Precisions by name: what layers compute in, and what linear layers alone do.

Parameters, gradients as they are reduced, and optimizer states are fp32 in all of them. fp16 ends at 65,504 and loses
what is below 6e-8, so that it is trained with loss scaling.
"""

from collections.abc import Mapping
from typing import Literal

LayerPrecision = Literal["bf16", "fp16", "fp32"]
"""What layers compute in, but linear layers in fewer bits."""
Precision = Literal["bf16", "fp16", "fp32", "fp8", "fp8-block", "mxfp8", "nvfp4"]
DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's name of the type that layers of a `LayerPrecision` compute in."""
SCALES_LOSS = "fp16"
"""The precision that is trained with loss scaling."""
