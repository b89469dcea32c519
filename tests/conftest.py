"""Settings of the whole test run: one torch thread, so that rounding and running time do not depend on the machine's load."""

import torch

torch.set_num_threads(1)
