"""Rules of attention, batch and heads free: grouped heads are the minor factor of the query's heads."""

from __future__ import annotations

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import aligned, from_letters
from autopar.rules.nodes import argument, shapes_of
from autopar.rules.notation import BoundRule, Dims, Shape


def _attention_letters(q: Node, k: Node, v: Node, causal: bool) -> tuple[dict[str, int], set[str]]:
    batch, heads, length, width = (int(n) for n in q.meta["val"].shape)
    _, groups, keys, _ = (int(n) for n in k.meta["val"].shape)
    sizes = {"b": batch, "k": groups, "g": heads // groups, "s": length, "t": keys, "d": width}
    sizes |= {_value_letter(q, v): int(v.meta["val"].shape[-1])}
    return sizes, {"t", "d", "e", *(("s",) if causal else ())} & {*sizes}


def _value_letter(q: Node, v: Node) -> str:
    """The letter of the values' width, which may be another than the keys'."""
    return "d" if q.meta["val"].shape[-1] == v.meta["val"].shape[-1] else "e"


def _mask_dims(mask: Node) -> Dims:
    shape = tuple(int(n) for n in mask.meta["val"].shape)
    return aligned(shape, (("b",), ("k", "g"), ("s",), ("t",)))


_Q: Dims = (("b",), ("k", "g"), ("s",), ("d",))
_KV: Dims = (("b",), ("k",), ("t",), ("d",))
_LSE: Dims = (("b",), ("k", "g"), ("s",))


def attention(node: Node) -> BoundRule:
    """`b (k g) s [d], b k [t] [d], b k [t] [e] -> b (k g) s [e], b (k g) s`; a causal query's `s` is whole."""
    q, k, v, mask, causal = node.args[:5]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    sizes, kept = _attention_letters(q, k, v, bool(causal))
    masks, width = [_mask_dims(mask)] if isinstance(mask, Node) else [], (_value_letter(q, v),)
    return from_letters([_Q, _KV, (*_KV[:3], width), *masks], [(*_Q[:3], width), _LSE], sizes, kept)


def attention_backward(node: Node) -> BoundRule:
    """dq follows the query; dk and dv are partial over split query groups and positions."""
    _, q, k, v, mask, _, _, causal = node.args[:8]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    sizes, kept = _attention_letters(q, k, v, bool(causal))
    masks, width = [_mask_dims(mask)] if isinstance(mask, Node) else [], (_value_letter(q, v),)
    out, values = (*_Q[:3], width), (*_KV[:3], width)
    return from_letters([out, _Q, _KV, values, *masks, out, _LSE], [_Q, _KV, values], sizes, kept, linear=((0,),))


_FUSED_Q: Dims = (("b",), ("h",), ("s",), ("d",))
_FUSED_KV: Dims = (("b",), ("h",), ("t",), ("d",))


def _fused(node: Node, q: Shape, k: Shape, causal: bool) -> tuple[list[Dims], dict[str, int], set[str]]:
    """The mask's dims (where there is one), sizes and whole letters of PyTorch's own attention."""
    sizes = {"b": q[0], "h": q[1], "s": q[2], "t": k[2], "d": q[3]}
    mask = node.kwargs.get("attn_mask")
    full: Dims = (("b",), ("h",), ("s",), ("t",))
    masks = [aligned(tuple(map(int, mask.meta["val"].shape)), full)] if isinstance(mask, Node) else []
    return masks, sizes, {"t", "d", *(("s",) if causal else ())}


def fused_attention(node: Node) -> BoundRule:
    """`b h s [d], b h [t] [d], b h [t] [d] -> b h s [d], b h s`"""
    q, k, *_ = shapes_of(node)[0]
    masks, sizes, kept = _fused(node, q, k, bool(argument(node, 4, "is_causal", False)))
    return from_letters([_FUSED_Q, _FUSED_KV, _FUSED_KV, *masks], [_FUSED_Q, _FUSED_Q[:3]], sizes, kept)


def fused_attention_backward(node: Node) -> BoundRule:
    """dq follows the query; dk and dv are partial over split positions."""
    _, q, k, *_ = shapes_of(node)[0]
    masks, sizes, kept = _fused(node, q, k, bool(argument(node, 7, "is_causal", False)))
    operands = [_FUSED_Q, _FUSED_Q, _FUSED_KV, _FUSED_KV, _FUSED_Q, _FUSED_Q[:3], *masks]
    return from_letters(operands, [_FUSED_Q, _FUSED_KV, _FUSED_KV], sizes, kept, linear=((0,),))


ROWS: Rows = {
    "autopar.attention": by(attention),
    "autopar.attention_backward": by(attention_backward),
    "aten._scaled_dot_product_flash_attention_for_cpu": by(fused_attention),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": by(fused_attention_backward),
}
