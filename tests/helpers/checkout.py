"""Make `research` of the checkout importable after the installed pyh2o."""

import sys

from compiled import ROOT

sys.path.append(str(ROOT))
