"""``python -m iree_lnbwd.cli`` is ``iree-lnbwd``."""

import sys

from iree_lnbwd.cli.command import main

sys.exit(main())
