"""samples.jsonl: the same prompts answered before and after a run, for eyes that do not read losses.

Greedy, so that nothing is drawn from the run's random state and a resumed run keeps its bits. Rank 0 answers alone: the
models of one process and of DDP are whole there, sharded ones are not (config.py refuses the key beside `deepspeed`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from halfbyte.checkpoint.output import write_text
from halfbyte.train.files import read_lines


class Samples(TrainerCallback):
    """Answers at the start (unless a resumed run has them) and at the end."""

    def __init__(self, path: Path, prompts: Sequence[str], max_new_tokens: int, tokenizer: Any):
        self.path, self.prompts, self.max_new_tokens, self.tokenizer = path, prompts, max_new_tokens, tokenizer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        kept = [row for row in read_lines(self.path) if row.get("step") == 0] if state.global_step else []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        if not kept and not state.global_step:
            self.answer(args, kwargs["model"], 0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.answer(args, kwargs["model"], state.global_step)

    def answer(self, args: Any, model: Any, step: int) -> None:
        """Append one line per prompt, answered in the run's dtype."""
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            texts = [answer(model, self.tokenizer, prompt, self.max_new_tokens) for prompt in self.prompts]
        rows = [{"step": step, "prompt": p, "answer": text} for p, text in zip(self.prompts, texts, strict=True)]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows), append=True)


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """What the model says, greedily; as a chat's first turn where the tokenizer has a chat template."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(prompt, return_tensors="pt")
    model = getattr(model, "module", model)  # under DistributedDataParallel
    training = model.training
    model.eval()
    try:
        made = model.generate(
            **ids.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    finally:
        model.train(training)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
