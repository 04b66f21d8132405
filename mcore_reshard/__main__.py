"""`python -m mcore_reshard`: the command line without its console script."""

import sys

from mcore_reshard.cli.main import main

sys.exit(main())
