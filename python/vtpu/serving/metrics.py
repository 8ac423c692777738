# SPDX-License-Identifier: MIT
"""Prometheus metrics under vLLM's names, so that existing dashboards work.

A text exposition of counters, gauges and histograms is a page of code, while
importing the usual client library would cost the emulated guest a second.
All updates come from the event loop's thread; gauges are read at scrape time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

# Seconds. Chosen to resolve both a native host and an emulated guest.
_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.75, 1.5, 3.0,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0,
)  # fmt: skip


class Counter:
    """A sum that only grows, a cell for each value of its one optional label."""

    def __init__(self, name: str, text: str, label: str = "") -> None:
        self.name, self.text, self.label = name, text, label
        self.values: dict[str, float] = {} if label else {"": 0}

    def add(self, amount: float, label_value: str = "") -> None:
        # A negative amount would be a bug elsewhere; it must not end a stream.
        self.values[label_value] = self.values.get(label_value, 0) + max(amount, 0)

    def lines(self, labels: str) -> list[str]:
        lines = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} counter"]
        for value, total in self.values.items():
            extra = f',{self.label}="{value}"' if self.label else ""
            lines.append(f"{self.name}{{{labels}{extra}}} {total}")
        return lines


class Reading:
    """A gauge or counter whose value lives elsewhere and is read when scraped."""

    def __init__(
        self, name: str, text: str, read: Callable[[], float], kind: str = "gauge"
    ) -> None:
        self.name, self.text, self.read, self.kind = name, text, read, kind

    def lines(self, labels: str) -> list[str]:
        return [
            f"# HELP {self.name} {self.text}",
            f"# TYPE {self.name} {self.kind}",
            f"{self.name}{{{labels}}} {self.read()}",
        ]


class Histogram:
    """Seconds, in cumulative buckets."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self.name, self.text, self.buckets = name, text, buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.buckets, seconds)] += 1
        self.sum += seconds

    def lines(self, labels: str) -> list[str]:
        lines = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} histogram"]
        total = 0
        bounds = [f"{bound:g}" for bound in self.buckets] + ["+Inf"]
        for bound, count in zip(bounds, self.counts, strict=True):
            total += count
            lines.append(f'{self.name}_bucket{{{labels},le="{bound}"}} {total}')
        lines.append(f"{self.name}_sum{{{labels}}} {self.sum!r}")
        lines.append(f"{self.name}_count{{{labels}}} {total}")
        return lines


class Metrics:
    """The server's metrics. Readings are added by whoever owns their values."""

    def __init__(self, model_name: str) -> None:
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"")
        self._labels = 'model_name="{}"'.format(escaped.replace("\n", r"\n"))
        self._all: list[Counter | Reading | Histogram] = []
        self.prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests that began to answer."
        )
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        self.request_success = self._counter(
            "request_success_total", "Requests ended, by reason.", "finished_reason"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _REQUEST_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Token to next token.", _TOKEN_BUCKETS
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS
        )
        self.request_queue_time = self._histogram(
            "request_queue_time_seconds", "Arrival to first step.", _REQUEST_BUCKETS
        )
        self.request_prefill_time = self._histogram(
            "request_prefill_time_seconds",
            "First step to first token.",
            _REQUEST_BUCKETS,
        )
        self.request_decode_time = self._histogram(
            "request_decode_time_seconds", "First to last token.", _REQUEST_BUCKETS
        )

    def add_reading(
        self, name: str, text: str, read: Callable[[], float], kind: str = "gauge"
    ) -> None:
        self._all.append(Reading("vllm:" + name, text, read, kind))

    def expose(self) -> str:
        """The text exposition format, version 0.0.4."""
        lines = [line for metric in self._all for line in metric.lines(self._labels)]
        return "\n".join(lines) + "\n"

    def _counter(self, name: str, text: str, label: str = "") -> Counter:
        counter = Counter("vllm:" + name, text, label)
        self._all.append(counter)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram("vllm:" + name, text, buckets)
        self._all.append(histogram)
        return histogram
