"""Fine-tuning with adapters by transformers.Trainer, under a plan, with the loss on completions alone.

torchrun --nproc-per-node 8 examples/lora_sft.py PLAN.json MODEL_FOLDER ROWS.jsonl OUT

The plan is of ``steelyard plan MODEL_FOLDER/config.json --train lora:r=16 …``. A row has a prompt and a completion.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, TrainingArguments

import steelyard
from steelyard.integrations.transformers import PlanTrainer

plan = steelyard.read_plan(sys.argv[1])
model, rows, out = map(Path, sys.argv[2:5])
tokenizer = AutoTokenizer.from_pretrained(model, padding_side="right")


def sample(row: dict[str, str]) -> dict[str, list[int]]:
    """The token ids of a row; what is no target has the label -100."""
    prompt = tokenizer(row["prompt"]).input_ids
    completion = [*tokenizer(row["completion"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    labels = [-100] * len(prompt) + completion
    return {"input_ids": (prompt + completion)[: plan.seq_len], "labels": labels[: plan.seq_len]}


samples = [sample(json.loads(line)) for line in rows.read_text().splitlines()]
held_out = len(samples) // 10
trainer = PlanTrainer(
    model,  # its weights are read straight into the shards of this process
    TrainingArguments(
        output_dir=str(out),
        num_train_epochs=3,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=5,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    plan=plan,
    train_dataset=samples[held_out:],
    eval_dataset=samples[:held_out],
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
trainer.save_model(str(out / "adapters"))
