# SPDX-License-Identifier: MIT
"""vTPU: a virtual TPU's serving stack, from an HTTP request down to the device."""
