"""``python -m inductor_grpo.tools``: the same as the command ``inductor-grpo``."""

from __future__ import annotations

import sys

from inductor_grpo.tools.cli import main

sys.exit(main())
