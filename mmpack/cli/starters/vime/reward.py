"""The reward that run.sh names. vime calls it once per response."""


async def score(args, sample, **more):  # yours
    """1 for the right letter, else 0."""
    return float(sample.response.strip()[:1] == sample.label)
