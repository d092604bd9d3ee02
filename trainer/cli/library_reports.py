"""Keep libraries from reporting to their makers what runs here; none is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

SWITCHES: Mapping[str, str] = {
    "DISABLE_SAFETENSORS_CONVERSION": "true",  # transformers asks the hub to convert what it loads
    "HF_HUB_DISABLE_TELEMETRY": "true",
    "HF_UPDATE_DOWNLOAD_COUNTS": "false",  # datasets counts on the hub who reads JSON, local or not
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}
"""Environment variables that libraries read once, when they are imported."""


def switch_off_reports() -> None:
    """Set the variables, for this process and those it starts; one that a user set stays."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
