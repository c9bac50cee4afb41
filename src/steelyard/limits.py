"""How large the numbers may be that a user gives: beyond what anybody has, and small enough to compute with.

Products of them stay within what 64 bits hold where whole numbers are multiplied, and within a double elsewhere.
"""

from typing import Annotated

from pydantic import Field

MOST_DEVICES = 2**16
MOST_LAYERS = 2**12
MOST_SIZE = 2**24
"""Of a layer: its width, its vocabulary, its experts, the positions that it knows."""
MOST_SAMPLES = 2**18
"""Of a step."""
MOST_MICROBATCHES = 2**16
MOST_TOKENS = 2**24
"""Of a sample."""
MOST_PIXELS = 2**14
"""Of a side of an image."""
MOST_STEP_TOKENS = 2**36
MOST_STEPS = 10**9
MOST_BYTES = 2**48
"""Of a device, or of what a layer asks of it: more fits nowhere, however much more it is."""
MOST_SECONDS = 1e9
MOST_PRICE = 1e9
"""Dollars for a device-hour."""
MOST_QUANTITY = 1e24
"""FLOP or bytes of a layer, for one sample."""
MOST_PER_S = 1e21
"""FLOP or bytes a second."""

DeviceCount = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Microbatches = Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(ge=1e-12, le=MOST_SECONDS, allow_inf_nan=False)]
BytesPerS = Annotated[float, Field(ge=1, le=MOST_PER_S, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
"""What a predicted time is multiplied by."""
Quantity = Annotated[float, Field(ge=-MOST_QUANTITY, le=MOST_QUANTITY, allow_inf_nan=False)]
