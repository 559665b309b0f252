"""Row splits, explicit groups, separation, sharing, per-input policies and auxiliaries."""


def configure(model, recipe, sources):
    recipe.assign("text/layers/0/mlp/down", rows=(0, 48), format="q8_g32_fp16", method="grouped_absmax")
    recipe.assign("text/layers/0/mlp/down", rows=(100, 128), format="bf16", method="cast_direct")
    recipe.separate(["text/layers/1/mlp/gate", "text/layers/1/mlp/up"])
    recipe.group(["text/layers/2/mlp/up", "text/layers/2/mlp/gate"])
    recipe.share("text/layers/4/mlp/down", "text/layers/2/mlp/down")
    recipe.assign("text/layers/*/gdn/output", format="q6_g64_fp16", activation_policy="AllowA8")
    recipe.use(
        "text/layers/1/mlp/up",
        "text/layers/1/ffn_input",
        activation_policy="AllowA4",
        auxiliaries={"activation_input_divisor": 2.5},
    )
    recipe.assign("vision/merger/fc?", format="bf16", method="cast_direct", layout="auto")
