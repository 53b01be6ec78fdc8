"""Validation of JSON text at the boundary: the one place where files from outside become our dataclasses.

    parse_json(Cluster, text, "cluster.json")      # a Cluster, or PlanError("cluster.json: field 'levels.0.size' …")

Invariants:
- one mistake gives one `PlanError` whose message names the file, the field, what was got and what was expected;
- numbers are never read from strings, unknown fields are refused (a dataclass opts in with `__pydantic_config__`).
"""

from __future__ import annotations

from typing import Any, TypeVar

from autopar.errors import PlanError

T = TypeVar("T")


def parse_json(kind: type[T], text: str, what: str) -> T:
    """The JSON `text` as a validated `kind` (a dataclass); `what` names the file or object in messages."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first, *rest = error.errors(include_url=False)
        more = f" (and {len(rest)} more)" if rest else ""
        raise PlanError(f"{what}: {_explain(dict(first))}{more}") from None


def json_schema(kind: type[Any]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `parse_json` reads as `kind`."""
    from pydantic import TypeAdapter

    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return draft | TypeAdapter(kind).json_schema()


def _explain(error: dict[str, Any]) -> str:
    field = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "json_invalid":
            return f"not JSON: {error['ctx']['error']}"
        case "missing":
            return f"field '{field}' is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"unknown field '{field}'"
        case "dataclass_type":
            return f"{f'field {field!r}' if field else 'the whole'} must be an object, got {_short(error['input'])}"
        case _:
            return f"field '{field}': {_lower(error['msg'])}, got {_short(error['input'])}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
