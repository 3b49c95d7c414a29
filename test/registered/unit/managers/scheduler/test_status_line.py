"""Lines of the log about requests: the scheduler's status, and one for each with --log-requests."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rigs.schedulers.scheduler_rig import SchedulerRig, prompt
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.tokenizer_manager import log_request
from sglang.srt.messages.io_struct import (
    CachedTokensDetails,
    FinishReason,
    RequestOutput,
    Stages,
    TextOutput,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")


@pytest.mark.settled
def test_the_status_line_sums_up_since_the_last(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = SchedulerRig(model, page_size=16)
    rig.scheduler._log._period = 0.0
    with caplog.at_level(logging.INFO):
        rig.generate([prompt(1, 100)], 1)
        rig.generate([prompt(1, 100), prompt(2, 50)], 1)
    lines = [one.getMessage() for one in caplog.records if "decode steps" in one.getMessage()]
    assert "1 prompts of 100 tokens (cached: device 0, host 0, storage 0)" in lines[0]
    assert "2 prompts of 150 tokens (cached: device 96, host 0, storage 0)" in lines[1]
    assert "mean first token" in lines[0]
    assert rig.scheduler.state.recent.scheduled == 0


def test_the_line_of_a_request_has_tiers_and_stages(caplog: pytest.LogCaptureFixture) -> None:
    state = RequestState(GenerateRequest(rid="mine", text="a"), created_time=1000.0)
    output = RequestOutput(
        rid="mine",
        output_ids=[1, 2],
        finish_reason=FinishReason(type="stop"),
        prompt_tokens=50,
        cached_tokens_details=CachedTokensDetails(device=16, host=4, storage=12),
        queue_time=0.25,
        stages=Stages(queue=0.25, l3_wait=0.125, prefill=0.5, decode=2.0),
    )
    state.apply(TextOutput(output=output, text="ab"))
    state.finished_time = 1003.0
    with caplog.at_level(logging.INFO):
        log_request(state)
    (record,) = caplog.records
    text = record.getMessage()
    assert "request mine: 50 prompt tokens (32 cached: device 16, host 4, storage 12)" in text
    assert "2 output tokens, queue 0.250 s, first token 1.000 s" in text
    assert "(l3 wait 0.125 s, prefill 0.500 s, decode 2.000 s), stop" in text
    fields = record.__dict__["fields"]
    assert fields["cached_tokens"] == {"device": 16, "host": 4, "storage": 12}
    assert fields["first_token_seconds"] == 1.0
    assert fields["stages"]["l3_wait"] == 0.125
