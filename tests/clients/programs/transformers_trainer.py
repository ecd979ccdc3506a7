"""Three steps of Hugging Face's Trainer, with a small GPT-2 and random tokens."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
tokens = torch.randint(0, 64, (32, 16))
arguments = TrainingArguments(
    output_dir="out", max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=1,
)  # fmt: skip
data = [{"input_ids": row, "labels": row} for row in tokens]
Trainer(model=model, args=arguments, train_dataset=data).train()
total = sum(parameter.double().sum().item() for parameter in model.parameters())
print("rank", os.environ["RANK"], "of", arguments.world_size, f"{total:.9f}", flush=True)
