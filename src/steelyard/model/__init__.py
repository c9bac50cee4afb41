"""Model to train: a chain of layer types, read from a Hugging Face config."""
