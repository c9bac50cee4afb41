"""The real modules of a model: built from its config, with tensor parallelism as a strategy says."""

import logging

for _name in (
    "torchao",
    "bitsandbytes",
    "torch.utils._pytree",
):  # of kernels that they lack, as transformers imports them
    logging.getLogger(_name).setLevel(logging.ERROR)
