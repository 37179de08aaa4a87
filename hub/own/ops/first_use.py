"""What Triton compiles for a kernel is not announced: that is the application's."""


def watch_triton() -> None:
    """Nothing."""
