"""Rules of attention, batch and heads free: grouped heads are the minor factor of the query's heads."""

from __future__ import annotations

from torch.fx import Node

from autopar.rules.entries import Rows, by
from autopar.rules.letters import aligned, from_letters
from autopar.rules.notation import BoundRule, Dims


def _attention_letters(q: Node, k: Node, causal: bool) -> tuple[dict[str, int], set[str]]:
    batch, heads, length, width = (int(n) for n in q.meta["val"].shape)
    _, groups, keys, _ = (int(n) for n in k.meta["val"].shape)
    sizes = {"b": batch, "k": groups, "g": heads // groups, "s": length, "t": keys, "d": width}
    return sizes, {"t", "d", *(("s",) if causal else ())}


def _mask_dims(mask: Node) -> Dims:
    shape = tuple(int(n) for n in mask.meta["val"].shape)
    return aligned(shape, (("b",), ("k", "g"), ("s",), ("t",)))


_Q: Dims = (("b",), ("k", "g"), ("s",), ("d",))
_KV: Dims = (("b",), ("k",), ("t",), ("d",))
_LSE: Dims = (("b",), ("k", "g"), ("s",))


def attention(node: Node) -> BoundRule:
    """`b (k g) s [d], b k [t] [d], b k [t] [d] -> b (k g) s [d], b (k g) s`; a causal query's `s` is whole."""
    q, k, _, mask, causal = node.args[:5]
    assert isinstance(q, Node) and isinstance(k, Node)
    sizes, kept = _attention_letters(q, k, bool(causal))
    masks = [_mask_dims(mask)] if isinstance(mask, Node) else []
    return from_letters([_Q, _KV, _KV, *masks], [_Q, _LSE], sizes, kept)


def attention_backward(node: Node) -> BoundRule:
    """dq follows the query; dk and dv are partial over split query groups and positions."""
    _, q, k, _, mask, _, _, causal = node.args[:8]
    assert isinstance(q, Node) and isinstance(k, Node)
    sizes, kept = _attention_letters(q, k, bool(causal))
    masks = [_mask_dims(mask)] if isinstance(mask, Node) else []
    return from_letters([_Q, _Q, _KV, _KV, *masks, _Q, _LSE], [_Q, _KV, _KV], sizes, kept, linear=((0,),))


ROWS: Rows = {
    "autopar.attention": by(attention),
    "autopar.attention_backward": by(attention_backward),
}
