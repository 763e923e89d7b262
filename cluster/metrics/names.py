"""Names and bounds: vLLM's where it has one, so that its users find their way."""

PREFIX = "kvrelay:"

# vLLM's, and some below its first.
INTER_TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def token_bounds(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10 ... up to `most`."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(bound for bound in bounds if bound <= most)
