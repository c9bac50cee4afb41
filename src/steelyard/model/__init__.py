"""What is trained: a model as a chain of layer kinds, read from a Hugging Face config."""
