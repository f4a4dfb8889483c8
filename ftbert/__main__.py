"""`python -m ftbert`: the command line."""

import sys

from ftbert.cli import main

if __name__ == "__main__":
    sys.exit(main())
