"""Marks on the terms of a loss: where scalars are added, so that each summand can be given a factor of its own.

    loss = ce + 0.01 * router        # traced as  ce + term(0.01 * router, 0); backward: term_backward(gradient, 0)

The marks are identities. `shares` multiplies by what it finds there and removes them: in the forward and in the
backward, where a term could not be told from the others by its nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("autopar_loss", "DEF")  # type: ignore[no-untyped-call]


def _copy(x: Tensor, index: int) -> Tensor:
    return x.clone()


def _register() -> None:
    for name in ("term", "term_backward"):
        _LIBRARY.define(f"{name}(Tensor x, int index) -> Tensor")
        _LIBRARY.impl(name, _copy, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopar_loss::{name}", _copy, lib=_LIBRARY)

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.index = inputs[1]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.autopar_loss.term_backward(gradient, ctx.index), None

    torch.library.register_autograd("autopar_loss::term", backward, setup_context=remember, lib=_LIBRARY)


_register()

TERM = torch.ops.autopar_loss.term.default
TERM_BACKWARD = torch.ops.autopar_loss.term_backward.default
WHOLE = -1
"""The index of the loss itself."""


def mark_loss(loss: Tensor) -> Tensor:
    """The loss, marked as the sum of all its terms."""
    marked: Tensor = torch.ops.autopar_loss.term(loss, WHOLE)
    return marked


def term_marks() -> dict[Any, Callable[..., Any]]:
    """The table for `CallMode`: the second summand of each sum of two scalars is marked."""
    count = itertools.count()
    adds = (torch.add, torch.sub, torch.Tensor.add, torch.Tensor.sub, torch.Tensor.add_, torch.Tensor.sub_)
    return {add: _marking(add, count) for add in adds}


def _marking(add: Callable[..., Any], count: Iterator[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or not all(_is_term(arg) for arg in args):
            return NotImplemented
        return add(args[0], torch.ops.autopar_loss.term(args[1], next(count)), **kwargs)

    return call


def _is_term(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad
