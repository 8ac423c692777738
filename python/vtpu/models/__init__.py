# SPDX-License-Identifier: MIT
"""Models, one architecture a file."""
