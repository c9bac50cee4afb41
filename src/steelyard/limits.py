"""Upper limits of the numbers in user input: larger than anybody needs, and small enough to compute with.

Products of whole numbers stay within 64 bits, all others within a double.
"""

from typing import Annotated

from pydantic import Field

MOST_DEVICES = 2**16
MOST_LAYERS = 2**12
MOST_SIZE = 2**24
"""Maximum width, vocabulary, number of experts and number of positions of a layer."""
MOST_SAMPLES = 2**18
"""Maximum number of samples per step."""
MOST_MICROBATCHES = 2**16
MOST_TOKENS = 2**24
"""Maximum number of tokens per sample."""
MOST_PIXELS = 2**14
"""Maximum side length of an image."""
MOST_STEP_TOKENS = 2**36
MOST_STEPS = 10**9
MOST_BYTES = 2**48
"""Maximum memory of a device, or of a layer on it. More fits nowhere, so larger values are equivalent."""
MOST_SECONDS = 1e9
MOST_PRICE = 1e9
"""Maximum price of a device-hour in dollars."""
MOST_QUANTITY = 1e24
"""Maximum FLOP or bytes of a layer for one sample."""
MOST_PER_S = 1e21
"""Maximum FLOP or bytes per second."""

DeviceCount = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Microbatches = Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(ge=1e-12, le=MOST_SECONDS, allow_inf_nan=False)]
BytesPerS = Annotated[float, Field(ge=1, le=MOST_PER_S, allow_inf_nan=False)]
FlopPerS = BytesPerS
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
"""Factor on a predicted time."""
Quantity = Annotated[float, Field(ge=-MOST_QUANTITY, le=MOST_QUANTITY, allow_inf_nan=False)]
