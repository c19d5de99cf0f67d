import pytest
import torch

from qerl.bench.measure import cuda_device
from qerl.errors import UserError


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is none")
def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match="needs a CUDA device"):
        cuda_device()
