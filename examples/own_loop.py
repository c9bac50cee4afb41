"""Your own training loop under a plan: torchrun --nproc-per-node 2 examples/own_loop.py PLAN CHECKPOINT_FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import steelyard

dist.init_process_group()
plan = steelyard.read_plan(sys.argv[1])
with torch.device("meta"):  # or AutoModelForCausalLM.from_pretrained(...), whose weights are kept
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plan.chain().config))
trainer = steelyard.parallelize(model, plan)
optimizers = trainer.make_optimizers(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
if Path(sys.argv[2]).exists():
    steelyard.load_checkpoint(trainer, optimizers, sys.argv[2])
for step in range(trainer.num_steps, trainer.num_steps + 10):
    first = torch.randint(200, (plan.global_batch, 1), generator=torch.Generator().manual_seed(step))
    tokens = (first + torch.arange(plan.seq_len + 1)) % 200  # a batch of sequences that count on
    loss = trainer.train_step(lambda samples, tokens=tokens: tokens[samples])
    trainer.clip_gradients(1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}")
evaluated = trainer.eval_step(lambda samples: tokens[samples])
if dist.get_rank() == 0:
    print(f"evaluated: loss {evaluated.item():.4f}")
steelyard.save_checkpoint(trainer, optimizers, sys.argv[2])
dist.destroy_process_group()
