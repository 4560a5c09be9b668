"""From a config.json to a `ModelShape`: transformers builds the model without memory, and its modules are counted.

No architecture is known by name. What a layer is for is read off where it stands: below a module called "attn" or
"attention" it belongs to attention, beside that to the MLP. Blocks that have neither (state spaces, convolutions) are
counted exactly, but what they keep for backward is an estimate; the plan says so.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from halfbyte.checkpoint.detect import detect, read_config
from halfbyte.checkpoint.shards import Shards
from halfbyte.checkpoint.skeleton import Skeleton
from halfbyte.nvfp4.format import BLOCK_SIZE
from halfbyte.parallel.fsdp2 import transformer_blocks
from halfbyte.plan.settings import Settings
from halfbyte.plan.shape import Block, Experts, Linear, ModelShape, Norm, Part

LAST = ("o_proj", "out_proj", "dense", "c_proj", "wo", "down_proj", "fc2", "w2", "dense_4h_to_h")
EXCLUDING = ("modules_to_not_convert", "ignore", "exclude_modules")  # in the quantization_config of three formats


def read_shape(config: Any, where: Path, settings: Settings) -> ModelShape:
    """The shape of a config's model, its layers packed and adapted as the settings say.

    config  transformers' config.
    where   the folder or file it came from; where NVFP4 weights lie beside it, their files say which layers are packed,
            else those are taken that `halfbyte quantize` would choose and the config does not exclude.
    raises  ValueError for a model that transformers cannot build, or that names no blocks.
    """
    skeleton = Skeleton(config, where, buffers=False)
    model, text = skeleton.model, config.get_text_config()
    is_packed = packing_rule(skeleton, config, where, settings)
    is_adapted = adapting_rule(skeleton, settings)
    plan = getattr(text, "base_model_tp_plan", None) or {}
    blocks: list[tuple[Block, int]] = []
    notes: list[str] = []
    inside = 0
    for fqn, module in outermost_blocks(model):
        block = read_block(fqn, module, text, settings, is_packed, is_adapted, plan)
        inside += sum(parameter.numel() for parameter in module.parameters())
        if blocks and blocks[-1][0] == block:
            blocks[-1] = (block, blocks[-1][1] + 1)
        else:
            blocks.append((block, 1))
        if not block.known:
            notes.append(f"{type(module).__name__}: what it keeps for backward is an estimate")
        if block.experts:
            notes.append(f"{type(module).__name__}: experts stay dense, and their activations are an estimate")
    heads = text.num_attention_heads if hasattr(text, "num_attention_heads") else 1
    saved = saved_modules(model, settings.lora_modules_to_save)
    head = skeleton.output_embeddings
    return ModelShape(
        name=type(model).__name__,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        blocks=tuple(blocks),
        root_params=sum(parameter.numel() for parameter in model.parameters()) - inside,
        saved_params=sum(parameter.numel() for module in saved.values() for parameter in module.parameters()),
        head_saved=head in saved,
        tied=bool(skeleton.tied),
        attention=str(model.config._attn_implementation),
        notes=tuple(dict.fromkeys(notes)),
    )


def outermost_blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The transformer blocks, without blocks inside of blocks, by name."""
    blocks = set(map(id, transformer_blocks(model)))
    found: list[tuple[str, nn.Module]] = []
    for fqn, module in model.named_modules():
        if id(module) in blocks and not any(fqn.startswith(f"{other}.") for other, _ in found[-1:]):
            found.append((fqn, module))
    return found


def read_block(
    fqn: str,
    module: nn.Module,
    text: Any,
    settings: Settings,
    is_packed: Callable[[str, nn.Linear], bool],
    is_adapted: Callable[[str], bool],
    plan: dict[str, str],
) -> Block:
    """One block; names inside it are relative to it, so that equal blocks compare equal."""
    linears, norms, experts, counted = [], [], None, 0
    for name, inner in module.named_modules():
        own = dict(inner.named_parameters(recurse=False))
        if isinstance(inner, nn.Linear):
            whole = f"{fqn}.{name}"
            linears.append(
                Linear(
                    name=name,
                    n=inner.out_features,
                    k=inner.in_features,
                    bias=inner.bias is not None,
                    part=part_of(name),
                    packed=is_packed(whole, inner),
                    adapted=is_adapted(whole),
                    r=settings.lora_r,
                    style=style_of(whole, plan),
                )
            )
            counted += sum(parameter.numel() for parameter in own.values())
        elif "norm" in type(inner).__name__.lower() and own:
            norms.append(read_norm(name, inner, text))
            counted += norms[-1].size
        elif any(parameter.dim() == 3 and name for parameter in own.values()):
            experts = read_experts(own, text, settings)
            counted += experts.params
    linears = mark_last(linears)
    known = bool([x for x in linears if x.part == "attention"]) and not [x for x in linears if x.part == "other"]
    everything = sum(parameter.numel() for parameter in module.parameters())
    return Block(tuple(linears), tuple(halved(norms)), experts, everything - counted, known)


def part_of(name: str) -> Part:
    """Where a layer stands in its block, by its relative name."""
    parents = name.lower().rpartition(".")[0]
    if "attn" in parents or "attention" in parents:
        return "attention"
    if any(word in name.lower() for word in ("mlp", "feed_forward", "ffn", "fc1", "fc2", "expert", "moe")):
        return "mlp"
    return "other"


def mark_last(linears: list[Linear]) -> list[Linear]:
    """The same layers, each half's last one marked, by its usual name or else as the last in order."""
    marked = list(linears)
    for part in ("attention", "mlp"):
        places = [i for i, x in enumerate(linears) if x.part == part]
        named = [i for i in places if linears[i].name.rpartition(".")[2] in LAST]
        for i in named or places[-1:]:
            marked[i] = replace(linears[i], last=True)
    return marked


def read_norm(name: str, module: nn.Module, text: Any) -> Norm:
    """A norm; one over a head's width runs once a head."""
    size = sum(parameter.numel() for key, parameter in module.named_parameters(recurse=False) if key == "weight")
    size = size or sum(parameter.numel() for parameter in module.parameters(recurse=False))
    heads = getattr(text, "num_attention_heads", 1)
    last = name.rpartition(".")[2].lower()
    rows = 1
    if part_of(name) == "attention" and size < text.hidden_size and last.startswith(("q", "k")):
        rows = (getattr(text, "num_key_value_heads", None) or heads) if last.startswith("k") else heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        rows = rows if size == width else 1
    return Norm(name, size, rows, upcast=not isinstance(module, nn.LayerNorm))


def halved(norms: list[Norm]) -> list[Norm]:
    """Each norm with the half of the block it belongs to, and the side of it.

    Those inside attention stay there. Of the others four stand before and behind each half (Gemma), two named "post"
    behind them (OLMo 2), and otherwise the first half of them before attention, the rest before the MLP.
    """
    inner = [replace(norm, part="attention") for norm in norms if part_of(norm.name) == "attention"]
    outer = [norm for norm in norms if part_of(norm.name) != "attention"]
    behind = len(outer) == 2 and all("post" in norm.name for norm in outer)
    middle = (len(outer) + 1) // 2
    placed = []
    for i, norm in enumerate(outer):
        part: Part = "attention" if i < middle else "mlp"
        placed.append(replace(norm, part=part, after=i % 2 == 1 if len(outer) == 4 else behind))
    return [*placed[:middle], *inner, *placed[middle:]]


def read_experts(own: dict[str, nn.Parameter], text: Any, settings: Settings) -> Experts:
    """Stacked experts; the smaller of the stacked weights is [E, H, I] or [E, I, H]."""
    smallest = min((p for p in own.values() if p.dim() == 3), key=lambda parameter: parameter.numel())
    count, hidden = smallest.shape[0], text.hidden_size
    inner = smallest.numel() // count // hidden
    r = settings.lora_r * count if settings.lora_target_modules == "all-linear" else 0
    return Experts(
        params=sum(parameter.numel() for parameter in own.values()),
        inner=inner,
        active=getattr(text, "num_experts_per_tok", None) or 1,
        adapter_params=2 * r * (hidden + 2 * inner) + r * (inner + hidden),
    )


def style_of(fqn: str, plan: dict[str, str]) -> str:
    """A layer's style in the model's tensor-parallel plan: "colwise", "rowwise" or ""."""
    for pattern, style in plan.items():
        if style in ("colwise", "rowwise"):
            expression = re.escape(pattern).replace(re.escape("*"), "[0-9]+")
            if re.search(rf"(^|\.){expression}$", fqn):
                return style
    return ""


def packing_rule(skeleton: Skeleton, config: Any, where: Path, settings: Settings) -> Callable[[str, nn.Linear], bool]:
    """Whether a layer is NVFP4: as found in the files, or as `halfbyte quantize` chooses and the config excludes."""
    if not settings.packed:
        return lambda fqn, module: False
    packed = packed_layers(skeleton, where)
    if packed is not None:
        return lambda fqn, module: fqn in packed
    tied, head, patterns = skeleton.tied, skeleton.output_embeddings, excluded_patterns(config)

    def is_packed(fqn: str, module: nn.Linear) -> bool:
        if f"{fqn}.weight" in tied or fqn == head or module.in_features % BLOCK_SIZE:
            return False
        return not any(matches(fqn, pattern) for pattern in patterns)

    return is_packed


def packed_layers(skeleton: Skeleton, folder: Path) -> Collection[str] | None:
    """Names of the NVFP4 layers in a folder's files, by their headers; None where there are no such files."""
    if not any(folder.glob("*.safetensors")):
        return None
    config = read_config(folder)
    format = detect(folder, config)
    if format is None:
        return None
    with Shards(folder) as shards:
        found = format.find(shards, config, lambda key: skeleton.target(key).name)
    return {weight.model_fqn for weight in found.values()}


def excluded_patterns(config: Any) -> list[str]:
    """What a quantized config says stays dense."""
    block = getattr(config, "quantization_config", None) or {}
    block = block if isinstance(block, dict) else getattr(block, "__dict__", {})
    return [str(pattern) for key in EXCLUDING for pattern in block.get(key) or []]


def matches(fqn: str, pattern: str) -> bool:
    """As the formats write it: a name, the beginning of one, a wildcard, or `re:` and an expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], fqn) is not None
    return fnmatchcase(fqn, pattern) or fqn == pattern or fqn.startswith(f"{pattern}.")


def adapting_rule(skeleton: Skeleton, settings: Settings) -> Callable[[str], bool]:
    """Whether a layer carries LoRA, by PEFT's rules: all but the output layer, endings of names, or an expression."""
    targets, head = settings.lora_target_modules, skeleton.output_embeddings
    if targets == "all-linear":
        return lambda fqn: fqn != head
    if isinstance(targets, str):
        expression = re.compile(targets)
        return lambda fqn: expression.fullmatch(fqn) is not None
    return lambda fqn: any(fqn == target or fqn.endswith(f".{target}") for target in targets)


def saved_modules(model: Any, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Modules that are trained in full, by name."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if any(fqn == name or fqn.endswith(f".{name}") for name in names)
    }
