# SPDX-License-Identifier: MIT
"""The compiler's passes, one a file. Each is a frozen dataclass of its options."""
