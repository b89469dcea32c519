"""What /metrics shows, in Prometheus' text format.

Example: `Metrics().refused.labels("queue").inc()`.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)


class Metrics:
    """Counts of one server, in a registry of its own; safe to use from every thread."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.responses = Counter("spot_responses", "Answers by route and HTTP status", ["route", "status"], registry=registry)
        self.samples = Counter("spot_samples", "Samples by how they ended", ["outcome"], registry=registry)
        self.running = Gauge("spot_samples_running", "Samples that share the passes", registry=registry)
        self.waiting = Gauge("spot_samples_waiting", "Samples that wait for room", registry=registry)
        self.prompt_tokens = Counter("spot_prompt_tokens", "Tokens of prompts", registry=registry)
        self.tokens = Counter("spot_tokens", "Tokens of answers", registry=registry)
        self.batch_passes = Counter("spot_batch_passes", "Passes of the target, each shared by all running samples", registry=registry)
        self.passes = Counter("spot_sample_passes", "Passes counted once for every sample in them", registry=registry)
        self.steps = Counter("spot_steps", "Denoising steps, each a pass of standard decoding", registry=registry)
        self.drafted = Counter("spot_drafted_nodes", "Guesses that were evaluated", registry=registry)
        self.accepted = Counter("spot_accepted_nodes", "Guesses that were right", registry=registry)
        self.seconds = Histogram("spot_request_seconds", "Seconds from a request to its whole answer", buckets=_SECONDS, registry=registry)
        self.first_text = Histogram(
            "spot_first_text_seconds", "Seconds from a request to its first text", buckets=_SECONDS, registry=registry
        )

    def render(self) -> bytes:
        """Return the text."""
        return generate_latest(self.registry)
