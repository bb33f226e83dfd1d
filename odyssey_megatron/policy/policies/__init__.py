"""The policies, one per file. Every module in this package is a policy: there is no list."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from odyssey_megatron.policy.proposal import Policy


def _found() -> tuple[Policy, ...]:
    modules = (import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__))
    policies: list[Policy] = [module.POLICY for module in modules]
    return tuple(sorted(policies, key=lambda one: (one.order, one.name)))


POLICIES = _found()
"""All policies, sorted by ``order`` and name."""
