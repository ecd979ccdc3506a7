"""The smallest program: what is measured is everything around it."""

import os

os.environ["RANK"]
