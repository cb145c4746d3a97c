"""The row of the fleet's dashboard that is about the gateway: requests, and what it adds to them."""

from __future__ import annotations

from panel import Panel, Row, W

API = 'route=~"/v1/.*"'
R = "tokenfleet_gateway_requests_total"


def quantiles_of(metric: str) -> dict[str, str]:
    """Legend -> quantile over all gateways; they have no model."""
    return {
        f"p{share * 100:g}": f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{W})))"
        for share in (0.5, 0.95, 0.99)
    }


GATEWAY = Row(
    "Gateway",
    [
        Panel(
            "Requests by status",
            "Of the API, all models. 429: a tenant at its limit; 499: the client went before the answer; 5xx: ours.",
            "reqps",
            {"{{status}}": f"sum by (status) (rate({R}{{{API}}}{W}))"},
            stacked=True,
        ),
        Panel(
            "Requests by route",
            "What is asked for. Polling of batches and long answers look alike here: see the next panel.",
            "reqps",
            {"{{route}}": f"sum by (route) (rate({R}{{{API}}}{W}))"},
            stacked=True,
        ),
        Panel(
            "Requests open",
            "Being answered at this moment, and how many of them are event streams.",
            "none",
            {
                "all": "sum(tokenfleet_gateway_requests_running)",
                "streams": "sum(tokenfleet_gateway_streams_open)",
            },
        ),
        Panel(
            "First token, as a client sees it",
            "Of streams: from the request's first line to the first token written out. Queue and engine are part of it.",
            "s",
            quantiles_of("tokenfleet_gateway_time_to_first_token_seconds"),
            log=True,
        ),
        Panel(
            "Added to the first token",
            "What of it is the gateway: until the job is queued, and from the token's arrival until it is written out. "
            "Above some ten milliseconds the process is busy: start another.",
            "s",
            quantiles_of("tokenfleet_gateway_first_token_added_seconds"),
            log=True,
        ),
        Panel(
            "Refused for now, and clients gone",
            "429 a minute: tenants at their limits. Gone: clients that closed the connection before the end; their jobs end too.",
            "suffix: /min",
            {
                "429": f'60 * sum(rate({R}{{status="429"}}{W}))',
                "gone": f"60 * sum(rate(tokenfleet_gateway_readers_gone_total{W}))",
            },
        ),
        Panel(
            "Length of requests",
            "From the first line to the end of the answer, by route. Streams last as long as their jobs.",
            "s",
            {
                "p95 {{route}}": "histogram_quantile(0.95, sum by (le, route) (rate("
                f"tokenfleet_gateway_request_duration_seconds_bucket{{{API}}}{W})))"
            },
            width=24,
            log=True,
        ),
    ],
)
