"""What can go wrong, as types: each message names the object, what was got, what was expected and the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.certificate import Certificate


class Error(Exception):
    """A mistake that the user can mend; the command line prints its message and exits with `exit_status`."""

    exit_status = 2


class CaptureError(Error):
    """The model can't be captured as a graph (data-dependent control flow, no loss, …)."""


class RuleError(Error):
    """A sharding rule is malformed or was refuted by execution."""


class PlanError(Error):
    """A plan, a pin or a cluster doesn't fit what it is used with."""


class LayersDifferError(PlanError):
    """A plan looked at few of the layers that seemed equal, and the model treats them differently."""


class InfeasibleError(Error):
    """No plan fits the memory of the cluster's devices; the message says what would, `certificate` says it as data."""

    exit_status = 3

    def __init__(self, message: str = "", certificate: Certificate | None = None) -> None:
        super().__init__(message)
        self.certificate = certificate


class VerificationError(Error):
    """The program's numbers differ from the single-device step."""

    exit_status = 1
