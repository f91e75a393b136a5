"""Install the values of CUDA's operators in every Python process of a run, before its own code
starts.
"""

import os
import sys

if os.environ.get("FAKE_CUDA_VALUES"):
    from tests.fake_cuda.kernels import install

    install()
    # Triton's kernels would do nothing; torch's operators run where it cannot be imported.
    sys.modules["triton"] = None
