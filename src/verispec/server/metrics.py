"""Prometheus metrics under vLLM's names, with a prefix of the operator's choice; each server counts for itself."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from verispec.engine.thread import Status
from verispec.types import FinishReason, SampleOutput, TokenEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_POSITIONS = 32  # of a draft that are counted apart
_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds


class Metrics:
    """Counters of one server; `status` says what the engine has to do when somebody looks."""

    def __init__(self, prefix: str, status: Callable[[], Status]) -> None:
        registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> _Seconds:
            found = _Seconds(f"{prefix}:{name}", text)
            registry.register(found)
            return found

        self._registry = registry
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._ended = counter("request_success", "Samples that ended, by reason.", "finished_reason")
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first K/V slots.")
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._gap = histogram("inter_token_latency_seconds", "From one commit to the next, per token.")
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in it.")
        self._drafts = counter("spec_decode_num_drafts", "Drafts judged.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft.", "position"
        )
        self._per_position = [per_position.labels(str(i)) for i in range(MAX_POSITIONS)]
        self.refused = counter("requests_refused", "Requests refused because the queue was full.")
        self.receipts = counter("receipts", "Receipts made.")
        self.replays = counter("replays", "Receipts replayed over HTTP.")
        self.replay_failures = counter("replay_failures", "Of these, those that were not reproduced.")
        registry.register(_EngineLoad(prefix, status))

    def count_commits(self, events: Iterable[TokenEvent]) -> None:
        """Count what some steps committed."""
        num_tokens = 0
        for event in events:
            num_tokens += len(event.logprobs)
            if event.num_accepted or event.rejected_ids:
                self._drafts.inc()
                self._drafted.inc(event.num_accepted + len(event.rejected_ids))
                self._accepted.inc(event.num_accepted)
                for position in self._per_position[: event.num_accepted]:
                    position.inc()
        self._generated.inc(num_tokens)

    def count_end(self, output: SampleOutput) -> None:
        """Count a sample that has ended."""
        stats = output.stats
        self._ended.labels(str(output.finish_reason)).inc()
        self._prompt.inc(output.prompt_len)
        self._queries.inc(output.prompt_len)
        self._hits.inc(stats.cached_tokens)
        if stats.start_time is not None:
            self._queue.observe([stats.start_time - stats.arrival_time])
        if stats.time_to_first_token is not None:
            self._first.observe([stats.time_to_first_token])
        if stats.finish_time is not None:
            self._whole.observe([stats.finish_time - stats.arrival_time])
        self._gap.observe(stats.gaps)

    def count_aborted(self, num_samples: int) -> None:
        """Count samples whose end nobody waited for: the client left, read too slowly, or its time was up."""
        if num_samples:
            self._ended.labels(str(FinishReason.ABORT)).inc(num_samples)

    def add(self, counts: Collector) -> None:
        """Show counts that somebody else keeps."""
        self._registry.register(counts)

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)


class _Seconds:
    """A histogram that takes many values at once: every token of an answer has one."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        """Count values, in seconds."""
        for value in values:
            self._counts[bisect_left(_BOUNDS, value)] += 1
            self._sum += value

    def collect(self) -> Iterable[Metric]:
        """As Prometheus has it: a bucket counts all that is not above its bound."""
        buckets = list(zip([*map(str, _BOUNDS), "+Inf"], accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class _EngineLoad:
    """Gauges and totals that the engine keeps itself."""

    def __init__(self, prefix: str, status: Callable[[], Status]) -> None:
        self._prefix = prefix
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """What is true now."""
        status, prefix = self._status(), self._prefix
        gauges = {
            "num_requests_running": ("Samples that hold K/V.", status.num_running),
            "num_requests_waiting": ("Samples in the queue.", status.num_waiting),
            "kv_cache_usage_perc": (
                "The share of the K/V slots that running samples hold, 1 for all.",
                status.kv_usage,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"{prefix}:{name}", text, value=value)
        totals = {
            "num_preemptions": ("Samples that lost their K/V to others for a while.", status.totals.preemptions),
            "determinism_replays": ("Canonical passes that verified regular decoding.", status.totals.replays),
            "determinism_mismatches": ("Of these, those that found another token.", status.totals.mismatches),
            "determinism_recomputed_tokens": ("Tokens dropped for that.", status.totals.recomputed),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"{prefix}:{name}", text, value=value)
