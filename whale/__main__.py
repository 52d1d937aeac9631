"""`python -m whale`: the command line where nothing is installed."""

import sys

from whale.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
