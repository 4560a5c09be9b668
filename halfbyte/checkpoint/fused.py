"""Linears that serving engines fuse into one: their tensor scales must be equal.

vLLM joins q/k/v and gate/up into one weight and takes the largest of the members' tensor scales without rescaling
their block scales: unequal members are silently wrong (FORMATS.md: a ratio of 2.5 gives 151% error). So members share
one when we quantize, and are checked when we export. The names are those of vLLM's `packed_modules_mapping`s.
"""

from collections.abc import Iterable

SETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
)
SET_OF = {leaf: leaves for leaves in SETS for leaf in leaves}


def fused_groups(fqns: Iterable[str]) -> list[list[str]]:
    """The names in groups that are fused, singles included, in the order of first appearance."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for fqn in fqns:
        parent, _, leaf = fqn.rpartition(".")
        groups.setdefault((parent, SET_OF.get(leaf, (leaf,))), []).append(fqn)
    return list(groups.values())
