"""A row of the table by which the numba step finds a tensor: int64 addresses and sizes, as COLUMNS names them."""

COLUMNS = (
    "param", "grad", "numel", "step", "quantized",
    "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "max_exp_avg_sq", "max_exp_avg_sq_scale",
    "seed", "offset", "inner", "outer",
)  # fmt: skip
PARAM, GRAD, NUMEL, STEP, QUANTIZED, MOMENTS, SEED, OFFSET, INNER, OUTER = 0, 1, 2, 3, 4, 5, 11, 12, 13, 14
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
