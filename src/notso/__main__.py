"""`python -m notso` is the command `notso`."""

import sys

from notso.cli import main

sys.exit(main())
