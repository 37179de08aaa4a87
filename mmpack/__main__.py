"""`python -m mmpack` is the command `mmpack`."""

import sys

from mmpack.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
