"""transformers' plain Trainer on an NVFP4 base, with an 8-bit optimizer; nothing of halfbyte.train is used.

python examples/own_trainer.py BASE TEXT.jsonl OUTPUT        lines of {"text": ...}
"""

import sys

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

import halfbyte
from halfbyte.optim import AdamW8bit

base, data, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
rows = load_dataset("json", data_files=data, split="train")
rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=128), remove_columns=rows.column_names)

model = get_peft_model(
    halfbyte.load_model(base, dtype="float32"), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(output, max_steps=5, per_device_train_batch_size=2, learning_rate=1e-3, report_to="none"),
    train_dataset=rows,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    optimizer_cls_and_kwargs=(AdamW8bit, {"lr": 1e-3}),
)
trainer.train()
model.save_pretrained(output)
print(f"adapter in {output}")
