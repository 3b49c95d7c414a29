"""Figures that decide if packing pages pays."""

from __future__ import annotations

import pytest

from sglang.srt.constants import KIB, MIB
from sglang.srt.disaggregation.common.staging import LINKS, UNIT_BYTES, LinkCosts
from sglang.srt.distributed.device_communicators.mooncake_protocol import SUPPORTED_PROTOCOLS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

NVLINK = LINKS["nvlink_intra"]


def test_a_block_costs_its_bytes_and_a_call() -> None:
    link = LinkCosts(block_s=2.0, bytes_per_s=10.0, packing_s=7.0, unit_s=3.0)
    assert link.direct_s(3, 40) == 3 * 2 + 4
    assert link.packed_s(40, 15) == 7 + 3 * 3 + 4
    assert [link.packing_pays(blocks, 40, 15) for blocks in (8, 9)] == [False, True]


@pytest.mark.parametrize(
    ("tokens", "page_blocks", "wanted"),
    [
        (8192, 128, True),  # Each of 128 pages by itself.
        (8192, 1, False),  # One run: 72 blocks of 16 MB.
        (8192, 10, False),
        (8192, 20, True),
        (32768, 512, True),
        (32768, 1, False),
        (1024, 16, True),
        (1024, 4, False),
        (64, 1, False),  # One page.
    ],
)
def test_small_blocks_over_nvlink_are_packed(tokens: int, page_blocks: int, wanted: bool) -> None:
    num_bytes = tokens * 144 * KIB
    assert NVLINK.packing_pays(72 * page_blocks, num_bytes, UNIT_BYTES) is wanted


def test_figures_are_those_that_were_measured() -> None:
    scattered, run = 8192 * 144 * KIB / 26e9, 8192 * 144 * KIB / 306e9
    assert NVLINK.direct_s(9216, 8192 * 144 * KIB) == pytest.approx(scattered, rel=0.1)
    assert NVLINK.direct_s(72, 8192 * 144 * KIB) == pytest.approx(run, rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "unit_mib", "gb_s"),
    [
        (8192, 64, 116.6), (8192, 128, 145.7), (8192, 256, 159.7),
        (32768, 64, 142.1), (32768, 128, 185.0), (32768, 256, 268.7),
    ],
)  # fmt: skip
def test_packed_figures_are_those_that_were_measured(
    tokens: int, unit_mib: int, gb_s: float
) -> None:
    num_bytes = tokens * 144 * KIB
    seconds = NVLINK.packed_s(num_bytes, unit_mib * MIB)
    assert seconds == pytest.approx(num_bytes / gb_s / 1e9, rel=0.16)


def test_links_are_protocols() -> None:
    assert LINKS.keys() <= set(SUPPORTED_PROTOCOLS)
    assert UNIT_BYTES % (2 * MIB) == 0, "a driver's page"
