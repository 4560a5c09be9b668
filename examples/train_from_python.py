"""A training run from Python: the same config object that YAML builds.

python examples/train_from_python.py BASE DATA OUTPUT
"""

import sys

from halfbyte.train import build_config, train

base, data, output = sys.argv[1:]
config = build_config(
    {
        "base_model": base,
        "datasets": [data],
        "val_set_size": 0.1,
        "sequence_len": 128,
        "max_steps": 10,
        "learning_rate": 1e-3,
        "output_dir": output,
    }
)
result = train(config)
print(f"held-out loss {result.loss_before:.3f} -> {result.loss_after:.3f}, adapter in {result.adapter}")
