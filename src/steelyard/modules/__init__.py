"""The real modules of a model: built from its config, with tensor parallelism as a strategy says."""

import logging

for _name in ("torchao", "torch.utils._pytree"):  # of kernels for other GPUs, as transformers imports it
    logging.getLogger(_name).setLevel(logging.ERROR)
