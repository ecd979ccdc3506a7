"""Three steps of Hugging Face's Trainer with FSDP, a small Llama and random tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
model = LlamaForCausalLM(config)
tokens = torch.randint(0, 1024, (64, 128))
arguments = TrainingArguments(
    output_dir="out", max_steps=3, per_device_train_batch_size=4, report_to=[], bf16=True,
    save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=1, fsdp=True,
    fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)  # fmt: skip
data = [{"input_ids": row, "labels": row} for row in tokens]
Trainer(model=model, args=arguments, train_dataset=data).train()
