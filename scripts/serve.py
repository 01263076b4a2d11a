"""Start the server. `--help` lists the options."""

import sys

from serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
