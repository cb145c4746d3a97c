"""`tokenfleet acl`: the least rights of a role, as the command that gives them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from tokenfleet.worker.commands import base
from tokenfleet.worker.commands.base import Namespace, Output, OutputOption


class Role(StrEnum):
    PRODUCER = "producer"
    GATEWAY = "gateway"
    WORKER = "worker"
    OPERATOR = "operator"


def acl(
    role: Annotated[Role, typer.Argument(help="Who is to have them.", show_default=False)],
    user: Annotated[
        str | None, typer.Option(help="Name of the ACL user.", show_default="the role's")
    ] = (None),
    namespace: Namespace = base.DEFAULT_NAMESPACE,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print the ACL rules that a client, gateway, worker or operator needs, and no more.

    Run in Redis what it prints, with a password in place of PASSWORD.
    """
    from tokenfleet.producer.errors import InvalidJob
    from tokenfleet.producer.rights import gateway_rules, producer_rules
    from tokenfleet.worker.rights import operator_rules, worker_rules

    name = role.value if user is None else user
    try:
        rules = {
            Role.PRODUCER: producer_rules,
            Role.GATEWAY: gateway_rules,
            Role.WORKER: worker_rules,
            Role.OPERATOR: operator_rules,
        }[role](namespace)
        if not name.isprintable() or len(name.split()) != 1:
            raise InvalidJob("user", name, "must be one word")
    except InvalidJob as error:
        base.fail(error, output)
    if output is Output.JSON:
        base.print_json({"user": name, "rules": rules})
    else:
        typer.echo(f"ACL SETUSER {name} on >PASSWORD {' '.join(rules)}")
