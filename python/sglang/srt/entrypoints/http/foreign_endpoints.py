"""SGLang's endpoints that this engine lacks, each with what to do instead.

A client that is told 404 looks for a wrong address; one that is told the remedy does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_CHAT: Final = "send the conversation to /v1/chat/completions, with"
_OTHER_MODELS: Final = "its model generates text; for this, use a server of a model that does it"

FOREIGN_ENDPOINTS: Final[Mapping[str, str]] = {
    path: remedy
    for paths, remedy in (
        (
            "/v1/embeddings /encode /v1/rerank /v1/score /classify /v1/classify",
            _OTHER_MODELS,
        ),
        (
            "/v1/audio/transcriptions /v1/audio/speech /v1/images/generations /v1/images/edits "
            "/v1/videos",
            _OTHER_MODELS,
        ),
        ("/parse_function_call", f"{_CHAT} --tool-call-parser"),
        ("/separate_reasoning", f"{_CHAT} --reasoning-parser"),
        (
            "/update_weights /update_weights_from_disk /update_weights_from_tensor "
            "/update_weights_from_distributed /update_weights_from_ipc /init_weights_update_group "
            "/destroy_weights_update_group /update_weight_version /get_weights_by_name",
            "weights stay as they were loaded; start a server with the other checkpoint",
        ),
        (
            "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance",
            "use --remote-instance-weight-loader-backend transfer_engine",
        ),
        (
            "/release_memory_occupation /resume_memory_occupation",
            "a server keeps its device memory; end it, and start it again",
        ),
        (
            "/load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter",
            "merge the adapter into the checkpoint",
        ),
        (
            "/start_expert_distribution_record /stop_expert_distribution_record "
            "/dump_expert_distribution_record",
            "experts stay where they are; leave it out",
        ),
        (
            "/configure_logging /set_trace_level /set_internal_state",
            "start the server with the flags for it",
        ),
        ("/weight_version /get_weight_version", "GET /model_info has it"),
        ("/generate_from_file", "send the text to /generate"),
        ("/weights_checker /freeze_gc /slow_down", "leave it out"),
        (
            "/health_scheduler",
            "probe /health, or /health_generate, which needs every scheduler's answer",
        ),
        ("/clear_hicache_storage_backend", "use POST /hicache/storage-backend/clear"),
        ("/api/chat /api/generate /api/tags /api/show", "use OpenAI's API, below /v1"),
        ("/invocations", "use /v1/chat/completions"),
        ("/vertex_generate", "use /generate"),
        ("/ping", "probe /health"),
    )
    for path in paths.split()
}
"""Path to remedy."""
_BELOW: Final[Mapping[str, str]] = {
    "/v1/responses/": "it stores no responses; send the whole conversation as input",
    "/v1/conversations": "it stores no conversations; send them whole",
}
"""The same for all paths that begin so."""


def remedy_for(path: str) -> str | None:
    """The remedy for a request of `path`; None: SGLang has no such endpoint."""
    found = FOREIGN_ENDPOINTS.get(path)
    return found or next((one for begin, one in _BELOW.items() if path.startswith(begin)), None)
