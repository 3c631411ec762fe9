"""`python -m postlude` is the `postlude` command."""

import sys

from postlude.cli import main

sys.exit(main())
