"""Short names of the formats that official recipes choose from."""

from __future__ import annotations

Q4 = "q4_g64_fp16"
Q5 = "q5_g64_fp16"
Q6 = "q6_g64_fp16"
Q8 = "q8_g32_fp16"
FP8 = "fp8_e4m3fn_row_bf16"
NVFP4 = "nvfp4"
T2 = "t2_g128_fp16"
