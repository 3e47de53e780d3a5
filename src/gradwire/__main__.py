"""`python -m gradwire` is `gradwire`."""

import sys

from gradwire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
