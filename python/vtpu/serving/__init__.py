# SPDX-License-Identifier: MIT
"""Serving layer: OpenAI API, scheduler, KV block manager, engine loop.

Modules import each other explicitly; this package imports nothing, so that the
guest pays only for what it uses.
"""
