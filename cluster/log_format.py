"""How lines of log are written, and whether there is one for each request."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

LogFormat = Literal["text", "json"]


class LogArgs(BaseModel):
    """`requests`: a line for each one that has ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: LogFormat = "text"
    requests: bool = False

    def formatter(self) -> logging.Formatter:
        return JsonFormatter() if self.format == "json" else TextFormatter()


class TextFormatter(logging.Formatter):
    """Fields follow the message as name=value; what is wrong begins with how much so."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        is_wrong = record.levelno >= logging.WARNING
        level = f"{record.levelname.lower()}: " if is_wrong else ""
        fields = "".join(f"  {name}={value}" for name, value in _fields(record).items())
        return f"{super().formatMessage(record)}  {level}{record.message}{fields}"


class JsonFormatter(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What `extra={"fields": ...}` of a record has."""
    fields = record.__dict__.get("fields")
    return fields if isinstance(fields, dict) else {}
