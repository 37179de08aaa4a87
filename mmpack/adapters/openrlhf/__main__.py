"""`python -m mmpack.adapters.openrlhf …`: `python -m openrlhf.cli.train_ppo_ray …`, with the strategy of mmpack."""

from __future__ import annotations

import runpy
import sys

from mmpack.errors import MmpackError, needs


def main() -> None:
    with needs("openrlhf", "mmpack.adapters.openrlhf"):
        import openrlhf.utils

    from mmpack.adapters.openrlhf.strategy import get_strategy

    openrlhf.utils.get_strategy = get_strategy  # where train_ppo_ray takes it from
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        main()
    except MmpackError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
