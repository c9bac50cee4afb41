"""Llama under one parallelism dimension in stock PyTorch, as briefly as it can be written: what ours is compared with.

Each module has ``build(model, num_microbatches)``. It takes a `LlamaForCausalLM` on every rank and returns the function
that trains it on a global batch of token ids [N, S + 1]: forward, backward, clipping to norm 1, AdamW.
"""
