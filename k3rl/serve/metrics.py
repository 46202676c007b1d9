"""Counters of the server, as Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from k3rl.engine import DiskTier, Engine

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def engine_counters(engine: Engine) -> dict[str, tuple[str, float]]:
    """name -> (help, value) of what an engine and its prefix cache have counted since they started."""
    sums, prefix = engine.counters, engine.prefix_cache
    found = {
        "k3rl_engine_steps_total": ("Engine steps.", float(sums.steps)),
        "k3rl_engine_step_seconds_total": ("Seconds inside engine steps.", sums.step_s),
        "k3rl_engine_prefilled_tokens_total": ("Prompt tokens computed.", float(sums.prefilled_tokens)),
        "k3rl_engine_sampled_tokens_total": ("Tokens sampled.", float(sums.sampled_tokens)),
        "k3rl_engine_preempted_total": ("Requests preempted for want of memory.", float(sums.preempted)),
        "k3rl_engine_recomputed_tokens_total": (
            "Tokens computed again because the weights changed.",
            float(sums.recomputed_tokens),
        ),
    }
    if prefix is not None:
        found["k3rl_prefix_lookups_total"] = ("Prompts looked up.", float(prefix.counters.lookups))
        found["k3rl_prefix_hits_total"] = ("Prompts that began with a cached prefix.", float(prefix.counters.hits))
        for tier in prefix.tiers:
            if isinstance(tier, DiskTier):
                dropped, damaged = tier.counters.dropped, tier.counters.damaged
                found["k3rl_prefix_disk_dropped_total"] = (
                    "Cached prefix states that the disk refused.",
                    float(dropped),
                )
                found["k3rl_prefix_disk_damaged_total"] = ("Files not as they were written.", float(damaged))
    return found


class Histogram:
    """Counts of seconds in cumulative buckets, with their sum."""

    def __init__(self) -> None:
        self.counts = [0] * len(LATENCY_BUCKETS_S)
        self.count, self.sum = 0, 0.0

    def observe(self, seconds: float) -> None:
        self.count += 1
        self.sum += seconds
        for place, bound in enumerate(LATENCY_BUCKETS_S):
            self.counts[place] += seconds <= bound


class ServerMetrics:
    """What happened to requests: answers by (endpoint, status), tokens, cancellations, times to the first token."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.prompt_tokens = self.cached_tokens = self.sampled_tokens = self.cancelled = 0
        self.first_token, self.whole = Histogram(), Histogram()

    def text(self, gauges: Mapping[str, tuple[str, float]], counters: Mapping[str, tuple[str, float]]) -> str:
        """Prometheus exposition format 0.0.4. gauges, counters: name -> (help, value) of others."""
        own = {
            "k3rl_prompt_tokens_total": ("Prompt tokens of answered requests.", self.prompt_tokens),
            "k3rl_cached_prompt_tokens_total": ("Prompt tokens that the prefix cache had.", self.cached_tokens),
            "k3rl_sampled_tokens_total": ("Tokens of answers.", self.sampled_tokens),
            "k3rl_cancelled_requests_total": ("Requests whose client left.", self.cancelled),
        }
        lines = [
            "# HELP k3rl_requests_total Answers by endpoint and HTTP status.",
            "# TYPE k3rl_requests_total counter",
        ]
        lines += [
            f'k3rl_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
            for (endpoint, status), count in sorted(self.answers.items())
        ]
        for kind, values in (("counter", {**own, **counters}), ("gauge", gauges)):
            for name, (description, value) in values.items():
                lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}", f"{name} {_number(value)}"]
        lines += _histogram("k3rl_time_to_first_token_seconds", "Streamed requests.", self.first_token)
        lines += _histogram("k3rl_request_seconds", "Whole requests.", self.whole)
        return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """All digits: a counter that is rounded stands still between two readings."""
    return str(int(value)) if value == int(value) else repr(value)


def _histogram(name: str, description: str, histogram: Histogram) -> Iterable[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} histogram"
    for bound, count in zip(LATENCY_BUCKETS_S, histogram.counts, strict=True):
        yield f'{name}_bucket{{le="{bound:g}"}} {count}'
    yield f'{name}_bucket{{le="+Inf"}} {histogram.count}'
    yield f"{name}_sum {_number(histogram.sum)}"
    yield f"{name}_count {histogram.count}"
