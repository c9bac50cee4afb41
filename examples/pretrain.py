"""Pre-training by transformers.Trainer under a plan: a mixture read as a stream, packed, with evaluation.

torchrun --nproc-per-node 8 examples/pretrain.py PLAN.json TOKENIZER OUT HELD_OUT.jsonl A.jsonl:0.7 B.jsonl:0.3

Rows have a text. `steelyard train PLAN.json --dataset A.jsonl:0.7 --dataset B.jsonl:0.3` needs no script.
"""

import sys
from pathlib import Path

import torch
from datasets import interleave_datasets, load_dataset
from transformers import AutoTokenizer, TrainingArguments, default_data_collator

import steelyard
from steelyard.integrations.transformers import PlanTrainer

plan = steelyard.read_plan(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
out, held_out, *mixture = sys.argv[3:]
files, weights = zip(*(each.rsplit(":", 1) for each in mixture), strict=True)


def packed(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """Samples of the plan's length, one document behind another; what is left of these rows is dropped."""
    tokens = [token for text in rows["text"] for token in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    samples = [tokens[at : at + plan.seq_len] for at in range(0, len(tokens) - plan.seq_len + 1, plan.seq_len)]
    return {"input_ids": samples, "labels": samples}


parts = [load_dataset("json", data_files=file, split="train", streaming=True) for file in files]
probabilities = [float(weight) for weight in weights]
stream = interleave_datasets(parts, probabilities, seed=0, stopping_strategy="all_exhausted")
trainer = PlanTrainer(
    None,  # first weights, of args.seed
    TrainingArguments(
        output_dir=out,
        max_steps=20,
        learning_rate=1e-2,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=2,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    plan=plan,
    train_dataset=stream.shuffle(seed=0, buffer_size=1000).map(packed, batched=True, remove_columns=["text"]),
    eval_dataset=load_dataset("json", data_files=held_out, split="train").map(
        packed, batched=True, remove_columns=["text"]
    ),
    data_collator=default_data_collator,
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=any(Path(out).glob("checkpoint-*")))
trainer.save_model(f"{out}/final")
