"""`python -m zbpipe` is `zbpipe`."""

import sys

from .cli import main

sys.exit(main())
