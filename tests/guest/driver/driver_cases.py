# SPDX-License-Identifier: MIT
"""All that test_driver.py has run, as one program."""

from __future__ import annotations

import sys

import buffer_cases
import file_cases
import job_cases
import presence_cases
from cases import main
from presence_cases import ALONE

CASES = buffer_cases.CASES | job_cases.CASES | file_cases.CASES | presence_cases.CASES

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], CASES, ALONE))
