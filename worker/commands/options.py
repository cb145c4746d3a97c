"""Options that several commands share are declared once, and a command takes them as one value.

Invariant: a shell sees no difference: each field of such a value is an option of the command, with
the field's name, default and text, in the order of its declaration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def flat(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with an option for each field of those parameters that are dataclasses.

    A parameter's default, an instance, holds the defaults of its options.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    if not groups:
        return command
    parameters = [
        one
        for parameter in signature.parameters.values()
        for one in (
            _of_fields(parameter)
            if parameter.name in groups
            else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    ]

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            own = [spec.name for spec in fields(group)]
            given[name] = group(**{field: given.pop(field) for field in own})
        command(**given)

    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # as inspect documents it
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _of_fields(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    hints = get_type_hints(parameter.annotation, include_extras=True)
    return [
        inspect.Parameter(
            spec.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(parameter.default, spec.name),
            annotation=hints[spec.name],
        )
        for spec in fields(parameter.annotation)
    ]
