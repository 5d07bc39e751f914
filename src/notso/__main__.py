"""Entry point of `python -m notso`."""

import sys

from notso.cli import main

sys.exit(main())
