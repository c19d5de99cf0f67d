"""Each provider times the product that it names."""

import pytest
import torch

from bench.shapes import TINY
from benchmarks.linear import check_installed, check_products
from benchmarks.provider import PROVIDERS, LibraryLinears, Provider, add_adapter, cublas_bf16
from qerl.errors import RunError, UserError
from qerl.models.layer_spec import layer_spec

CPU = torch.device("cpu")


def test_an_adapter_is_added_to_each_linear_of_a_product():
    torch.manual_seed(0)
    gemm, rank = layer_spec(TINY).groups[0], 8
    shapes = (5, 256), (5, 128), (3 * rank, 128), (256, rank)
    y_MN, x_MK, a_RK, b_NR = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    rows, ranks = torch.arange(256), torch.arange(3 * rank)
    of_row = (rows >= 128).long() + (rows >= 192)  # q, k or v
    delta_NK = (b_NR.repeat(1, 3) * (of_row[:, None] == ranks // rank)) @ a_RK
    truth_MN = y_MN + x_MK @ delta_NK.T
    add_adapter(y_MN, x_MK, a_RK, b_NR, gemm)
    torch.testing.assert_close(y_MN, truth_MN)


def test_a_run_goes_through_all_products_of_all_layers():
    seen = []

    def product(x_MK, y_MN):
        seen.append((tuple(x_MK.shape), tuple(y_MN.shape)))
        return y_MN

    LibraryLinears(TINY, CPU, [[product] * 4] * 2, torch.zeros(1)).work(3, 0)()
    assert seen == [((3, g.in_width), (3, g.out_width)) for g in layer_spec(TINY).groups] * 2


def test_a_provider_multiplies_by_the_weight_it_names():
    check_products("cublas-bf16", cublas_bf16(TINY, CPU), 4)


def test_a_provider_that_is_wrong_is_not_timed():
    products = LibraryLinears(TINY, CPU, [[lambda x, y: y.fill_(1)] * 4], torch.randn(128, 128))
    with pytest.raises(RunError, match=r"wrong has a relative error of 1 at batch 4"):
        check_products("wrong", products, 4)


def test_a_missing_package_is_named():
    provider = Provider(
        make=cublas_bf16, bytes_per_weight=2, module="no_such.package", package="such-kernels"
    )
    with pytest.raises(UserError, match="provider such needs such-kernels"):
        check_installed("such", provider)
    check_installed("cublas-bf16", PROVIDERS["cublas-bf16"])
