"""Settings as JSON, and back: layouts and calibrations are objects. LangChain's own serialisation is closed to packages outside of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from agentcache import Calibration, LayoutOptions
from agentcache import errors as own

from .errors import ModelInvalidRequestError

# Settings that are objects, and their fields that JSON keeps as lists.
_OBJECTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {"layout": (LayoutOptions, ("repairs",)), "calibration": (Calibration, ("steps",))}


def rebuilt(name: str, value: Any) -> Any:
    """The setting that `plain` wrote."""
    form, listed = _OBJECTS.get(name, (None, ()))
    if form is None or not isinstance(value, Mapping):
        return value
    try:
        return form(**{**value, **{each: _tupled(value[each]) for each in listed if each in value}})
    except (TypeError, LookupError, own.AgentCacheError) as error:
        raise ModelInvalidRequestError(f"{name}={value!r:.200}: is no {form.__name__} ({error}); give what to_config() wrote") from error


def plain(value: Any) -> Any:
    """A setting as JSON would keep it."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (list, tuple)) else value
