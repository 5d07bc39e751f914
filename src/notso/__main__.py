"""Lets `python -m notso` run the command `notso`."""

import sys

from notso.cli import main

sys.exit(main())
