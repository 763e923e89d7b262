"""`format` in JSON schemas: one that JSON Schema does not define says nothing that an answer could
break, and is left out. One that it defines is kept, or refused by the library."""

from engine.grammar.schemas import Schema, without

LACKING = frozenset(  # of the library
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
_KEPT = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uri", "uuid"),
    )
)
_DEFINED = _KEPT | LACKING


def without_other_format(schema: Schema) -> Schema:
    kind = schema.get("format")
    return without(schema, "format") if isinstance(kind, str) and kind not in _DEFINED else schema
