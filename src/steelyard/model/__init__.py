"""What is trained: a model as a chain of layer types, read from a Hugging Face config."""
