"""torch after an import of the program's own package: torch is not imported before."""

import in_step
import torch

print(in_step.__name__, torch.ones(2).sum())
