"""The base class of all groups of settings, and messages about invalid values."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from disco_ds.config.secrets import refuse_secret
from disco_ds.names import CUSTOM_CODE, shorten

MAX_SECONDS = 1e7
"""Upper bound of timeouts in seconds: about four months. Longer timeouts overflow the clocks of
some libraries."""


MAX_COUNT = 2**62
"""Upper bound of numbers of samples, steps and other counts, so that they fit into int64."""
Tree = dict[str, Any]
"""A mapping from names to values, which may be mappings again, such as settings or the content of a JSON file."""
Count = Annotated[int, Ge(0), Le(MAX_COUNT)]
PositiveCount = Annotated[int, Gt(0), Le(MAX_COUNT)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
ProperFraction = Annotated[float, Ge(0), Lt(1)]
"""A fraction below 1."""
FunctionName = Annotated[str, Field(pattern=rf"^{CUSTOM_CODE}$")]
"""Custom code as `package.module:function`."""


class Settings(BaseModel):
    """Base class of a group of settings: frozen and typed; unknown keys are refused.

    The docstring below a field is the field's help text.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    def replace(self, **values: Any) -> Self:
        """Return a copy with other values, which are not validated."""
        return self.model_copy(update=values)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_misread(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse secrets and values of derived fields. Also refuse true and false for fields that are not bool.

        Otherwise pydantic would read true and false as the numbers 1 and 0.
        """
        field = cls.model_fields[info.field_name or ""]
        if field.exclude:
            raise ValueError("this is not a setting: its value follows from others")
        if isinstance(value, bool) and bool not in (field.annotation, *get_args(field.annotation)):
            raise ValueError(f"{str(value).lower()} is not valid here")
        for text in _list_texts(value):
            refuse_secret(text)
        return value


def _list_texts(value: Any) -> Iterator[str]:
    """Yield all strings in a value, which may be nested mappings and lists. Keys of mappings are left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _list_texts(item)


def explain_value(key: str, item: Any) -> str:
    """Return a one-line error message about an invalid value.

    Args:
        key: Dotted name of the setting.
        item: One item of the list that errors() of pydantic's ValidationError returns.
    """
    if item["type"] == "value_error":
        text = str(item["ctx"]["error"])  # a message about several settings names them itself
        return text if key.rpartition(".")[2] in text else f"{key}: {text}"
    expected = re.sub(
        r", (unable to|got a) .*| after validation| or instance of .*", "", item["msg"]
    )
    expected = re.sub(r"^\w+ should", "must", expected)
    return f"{key} {expected}, got {shorten(repr(item['input']))}"
