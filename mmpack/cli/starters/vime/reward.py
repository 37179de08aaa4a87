"""The reward that run.sh names. vime calls it with one response, or with a list of them."""


async def score(args, sample, **more):  # yours
    """1 for the right letter, else 0."""
    if isinstance(sample, list):
        return [await score(args, one, **more) for one in sample]
    return float(sample.response.strip()[:1] == sample.label)
