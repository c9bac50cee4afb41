"""steelyard: the fastest way to train a Transformer on the GPUs at hand, and proof that it fits."""
