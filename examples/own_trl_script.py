"""Your own TRL script on an NVFP4 base: `load_model` is the only line of halfbyte in it.

python examples/own_trl_script.py BASE DATA.jsonl OUTPUT
"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import halfbyte

base, data, output = sys.argv[1:]
trainer = SFTTrainer(
    model=halfbyte.load_model(base, dtype="float32"),
    processing_class=AutoTokenizer.from_pretrained(base),
    train_dataset=load_dataset("json", data_files=data, split="train"),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(
        output,
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        bf16=False,
        report_to="none",
        max_length=128,
    ),
)
trainer.train()
trainer.save_model(output)
print(f"adapter in {output}")
