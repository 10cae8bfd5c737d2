"""Lets `research` be imported from the checkout, behind the pyh2o that is installed."""

import sys

from compiled import ROOT

sys.path.append(str(ROOT))
