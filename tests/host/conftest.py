# SPDX-License-Identifier: MIT
"""What tests of several layers need."""

from __future__ import annotations

from pathlib import Path

import pytest
from vtpu_guest.model import fetch


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The model that the guest serves, fetched when missing."""
    return fetch()
