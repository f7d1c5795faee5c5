"""`python -m quicksand`: the command `quicksand`."""

import sys

from quicksand.cli import main

if __name__ == "__main__":
    sys.exit(main())
