"""`python -m spotd`, the same as the command `spotd`."""

import sys

from spotd.cli.daemon import main

sys.exit(main())
