"""Groups of tests that take minutes, which run only after changes to files that they depend on.

    python tests/long_tests.py             print the groups that are due, for LONG=
    python tests/long_tests.py --record    record that all groups (or those given as a,b) passed on the current files

A group's digest covers its files; tests/long_tests.json contains the digests with which it last passed. `make check`
runs and records the groups whose digest differs; `make test-long` runs and records all. So unchanged code is not tested
again, and changed code is always tested. Changes of comments and docstrings count only in the groups `WHOLE_TEXT`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")

FORMATS_AND_DEVICES = (
    "tests/smollm3/engine/test_answers_across_devices.py",
    "tests/smollm3/engine/test_cuda_bits.py",
    "tests/smollm3/engine/test_device_choice.py",
    "tests/smollm3/model/test_backends.py",
    "tests/smollm3/model/test_every_format.py",
)
"""Tests of whole models on every device and in every format, due after changes to the kernels or the engine."""

GROUPS: dict[str, tuple[str, ...]] = {
    "native": (
        "native",
        "CMakeLists.txt",
        "tests/native",
        "tests/aarch64.py",
        "tests/architecture/test_native_headers.py",
        "tests/qtensor/test_sanitizers.py",
        "tests/qtensor/test_emulated_tiles.py",
        "tests/qtensor/test_neon_from_python.py",
        "tests/smollm3/engine/test_answers_on_aarch64.py",
        "tests/qtensor/test_cuda_machine_code.py",
        "tests/qtensor/test_cuda_nvrtc.py",
        "benchmarks/cuda_bits.py",
        "src/notso/qtensor/backends/cuda",
        "tests/qtensor/test_emulated_cuda.py",
        "tests/qtensor/test_kernels_attention_bytes.py",
        "tests/qtensor/test_kernels_matmul.py",
        "tests/qtensor/test_fused_matmul.py",
        "tests/qtensor/test_neon.py",
        "tests/qtensor/test_packing.py",
        "tests/qtensor/test_threads.py",
        "tests/qtensor/test_uneven_cores.py",
        *FORMATS_AND_DEVICES,
        "tests/stub_gpu",
    ),
    "engine": (
        "src/notso/qtensor",
        *(
            f"src/notso/smollm3/{room}"
            for room in ("engine", "kv", "model", "output", "sampling", "scheduling", "text")
        ),
        "src/notso/smollm3/diagnostics",
        "tests/smollm3/diagnostics/test_engine_meter.py",
        "tests/smollm3/diagnostics/test_goldens.py",
        "benchmarks/cuda_bits.py",
        *FORMATS_AND_DEVICES,
        "tests/smollm3/engine/test_determinism.py",
        "tests/smollm3/engine/test_embeddings.py",
        "tests/smollm3/engine/test_engine_stress.py",
        "tests/smollm3/engine/test_library.py",
        "tests/smollm3/engine/test_memory_plan.py",
        "tests/smollm3/engine/test_one_generation.py",
        "tests/smollm3/engine/test_prefix_warmup.py",
        "tests/smollm3/engine/test_receipts.py",
        "tests/smollm3/engine/test_receipts_across_families.py",
        "tests/smollm3/engine/test_replay.py",
        "tests/smollm3/engine/test_reread.py",
        "tests/smollm3/engine/test_speculative_prefill.py",
        "tests/smollm3/kv/test_conversation_log.py",
        "tests/smollm3/kv/test_disk_store_damage.py",
        "tests/smollm3/kv/test_offload.py",
        "tests/smollm3/model/test_accuracy.py",
        "tests/smollm3/model/test_parity.py",
        "tests/smollm3/model/test_public_files.py",
        "tests/smollm3/sampling",
        "tests/smollm3/scheduling/test_scheduler.py",
        "tests/smollm3/text",
    ),
    "quotes": (
        "src/notso/documents/citations.py",
        "src/notso/smollm3/sampling/quote_index.py",
        "src/notso/smollm3/sampling/quote_index_child.py",
        "src/notso/smollm3/sampling/quote_index_files.py",
        "src/notso/smollm3/sampling/quoted_fields.py",
        "src/notso/smollm3/sampling/quotes.py",
        "tests/documents/test_citations.py",
        "tests/smollm3/sampling/test_quoted_fields.py",
        "tests/smollm3/sampling/test_quotes.py",
    ),
    "conversion": (
        "src/notso/qtensor",
        "src/notso/smollm3/conversion",
        "tests/smollm3/conversion",
    ),
    "store": (
        "src/notso/documents/passages.py",
        "src/notso/web/store",
        "tests/web/store/test_document_crash.py",
        "tests/web/store/test_documents.py",
    ),
    "chaos": (
        "deploy",
        "src/notso/cli",
        "src/notso/cluster",
        "src/notso/documents",
        "src/notso/plugins",
        "src/notso/system",
        "src/notso/web",
        "tests/chaos",
    ),
    "commands": (
        "src/notso/cli",
        "src/notso/smollm3/values",
        "src/notso/web/values",
        "tests/cli",
    ),
    "server": (
        "deploy",
        "src/notso/documents",
        "src/notso/web",
        "tests/documents",
        "tests/scripted_engine.py",
        "tests/web",
    ),
    "growth": (
        "src/notso/documents",
        "src/notso/smollm3/output",
        "src/notso/smollm3/sampling",
        "src/notso/smollm3/text",
        "src/notso/web",
        "tests/architecture/test_growth.py",
        "tests/architecture/test_growth_of_entries.py",
    ),
    "check": (
        ".ci",
        "Makefile",
        "tests/architecture/test_check_again.py",
        "tests/conftest.py",
    ),
    "clients": (
        "constraints.txt",
        "src/notso/web/api",
        "tests/scripted_engine.py",
        "supply/clients.txt",
        "supply/clients-lm-eval.txt",
        "supply/clients-openai-2.txt",
        "tests/clients",
    ),
    "tune": (
        "src/notso/cli/tune.py",
        "src/notso/smollm3/tuning",
        "src/notso/web/chat/files/quoting_rows.py",
        "supply/tune.txt",
        "tests/smollm3/tuning",
    ),
    "ray": (
        "src/notso/cli/cluster.py",
        "src/notso/cluster",
        "supply/ray.txt",
        "tests/cluster",
    ),
    "programs": (
        "src/notso/smollm3/output",
        "src/notso/smollm3/sampling",
        "src/notso/smollm3/text",
        "src/notso/web/api",
        "tests/strangers",
    ),
    "page": (
        "src/notso/documents",
        "src/notso/web",
        "tests/browser",
        "tests/web/rendering/test_rendering.py",
    ),
    "docs": (
        "README.md",
        "docs",
        "src/notso/cli",
        "src/notso/plugins",
        "src/notso/web/api",
        "src/notso/web/values",
        "tests/test_documented_blocks.py",
    ),
    "plants": (
        "src/notso/cli",
        "src/notso/smollm3/values",
        "src/notso/web/api",
        "src/notso/web/chat",
        "src/notso/web/edge",
        "src/notso/web/values",
        "supply/plant.py",
        "supply/routes.py",
        "tests/architecture/test_plants.py",
        "tests/smollm3/engine/test_library.py",
    ),
}
"""Group -> files and folders that its tests depend on."""

WHOLE_TEXT = frozenset({"commands", "growth", "check", "docs", "plants"})
"""Groups that read source files or help texts, so that comments and docstrings can change their results."""

STRING = rb"""'{3}(?:\\.|[^\\])*?'{3}|"{3}(?:\\.|[^\\])*?"{3}|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*\""""
STRING_OR_OMITTED = re.compile(rb"(?P<string>%s)|\n?[ \t]*#[^\n]*|\n[ \t]*(?=\n)" % STRING, re.DOTALL)

THINNED: dict[str, dict[str, dict[str, int]]] = {
    "engine": {
        "tests/smollm3/diagnostics/test_goldens.py": {
            "test_quantization_error_passes_but_planted_error_fails": 2,
            "test_planted_model_error_is_detected": 1,
        },
        "tests/smollm3/engine/test_answers_across_devices.py": {
            "test_cpu_and_emulated_gpu_give_identical_answers": 0,
        },
        "tests/smollm3/engine/test_determinism.py": {
            "test_logits_are_bit_identical_across_kernels_threads_and_chunks": 3,
            "test_sampled_answers_are_identical_across_kernels": 3,
        },
        "tests/smollm3/engine/test_prefix_warmup.py": {
            "test_second_turn_finds_all_but_the_new_words_cached": 2,
            "test_concurrent_chats_with_warmup_give_the_same_answers": 1,
        },
        "tests/smollm3/engine/test_receipts.py": {
            "test_unchanged_receipt_is_reproduced": 5,
        },
        "tests/smollm3/engine/test_receipts_across_families.py": {
            "test_receipts_are_reproduced_by_other_kernel_families": 1,
        },
        "tests/smollm3/engine/test_replay.py": {
            "test_replayed_answer_continues_identically_from_any_token": 5,
            "test_branch_of_a_replay_matches_a_cold_engine": 1,
        },
        "tests/smollm3/engine/test_reread.py": {
            "test_restored_and_cold_engines_give_identical_answers": 1,
        },
        "tests/smollm3/engine/test_speculative_prefill.py": {
            "test_message_extending_a_draft_reuses_the_cached_prefix": 2,
            "test_sent_draft_is_fully_cached_for_one_owner": 2,
        },
        "tests/smollm3/kv/test_offload.py": {
            "test_conversation_is_restored_completely_after_restart": 1,
            "test_damaged_files_are_recomputed_with_identical_answers": 1,
        },
        "tests/smollm3/model/test_backends.py": {
            "test_logits_of_float_weights_are_identical_on_all_backends": 0,
            "test_demo_model_steps_are_identical_on_all_backends": 1,
            "test_disk_cache_of_one_backend_is_used_by_another": 1,
        },
        "tests/smollm3/model/test_every_format.py": {
            "test_kernel_families_give_identical_answers_in_each_format": 3,
        },
        "tests/smollm3/model/test_public_files.py": {
            "test_documented_format_mix_matches_the_same_values_in_f32": 10,
        },
        "tests/smollm3/sampling/test_patterns.py": {
            "test_node_agrees_on_generated_patterns": 1,
        },
        "tests/smollm3/sampling/test_rare_filters.py": {
            "test_sampled_frequencies_match_the_probabilities": 1,
        },
        "tests/smollm3/sampling/test_sampler.py": {
            "test_sampled_frequencies_match_the_probabilities": 2,
            "test_nucleus_end_accounts_for_many_unlikely_tokens": 6,
        },
        "tests/smollm3/sampling/test_schemas.py": {
            "test_grammar_accepts_exactly_the_valid_values": 13,
        },
        "tests/smollm3/sampling/test_strict_tools.py": {
            "test_random_calls_follow_the_strict_tool_schema": 2,
        },
        "tests/smollm3/sampling/test_token_limit.py": {
            "test_demo_model_ends_twenty_of_twenty_answers": 1,
            "test_search_near_the_limit_is_bounded": 0,
            "test_answer_ends_within_its_limit_if_possible": 24,
        },
        "tests/smollm3/text/test_chat_template.py": {
            "test_omissions_of_a_template_are_detected": 1,
            "test_known_and_unknown_templates_render_equally": 1,
        },
        "tests/smollm3/text/test_template_sandbox.py": {
            "test_unsafe_template_operations_are_prevented": 10,
            "test_features_of_official_templates_are_supported": 4,
            "test_undefined_variable_is_named_in_the_error": 4,
        },
        "tests/smollm3/text/test_tokenizer_official.py": {
            "test_official_encoding_time_is_near_linear": 0,
            "test_official_ids_match_the_library": 1,
            "test_tokenizer_loads_about_as_fast_as_the_library": 0,
        },
        "tests/smollm3/text/test_tokenizer.py": {
            "test_encoding_time_is_near_linear_in_length": 4,
        },
        "tests/smollm3/sampling/test_quotes.py": {
            "test_hostile_text_does_not_increase_work_per_token": 2,
        },
        "tests/smollm3/engine/test_memory_plan.py": {
            "test_kv_format_depends_on_weights_and_is_remembered": 2,
        },
        "tests/smollm3/model/test_parity.py": {
            "test_adapter_logits_match_peft": 1,
        },
        "tests/smollm3/kv/test_disk_store_damage.py": {
            "test_random_damage_is_detected": 1,
        },
    },
    "native": {
        "tests/qtensor/test_kernels_attention_bytes.py": {
            "test_attention_matches_numpy_bit_for_bit": 7,
        },
        "tests/qtensor/test_kernels_matmul.py": {
            "test_extremes_do_not_overflow": 8,
            "test_kernel_families_agree": 40,
            "test_kernel_families_agree_on_long_rows": 8,
            "test_row_panels_agree_and_stay_within_bounds": 8,
        },
        "tests/qtensor/test_threads.py": {
            "test_thread_count_does_not_change_products": 8,
        },
        "tests/qtensor/test_uneven_cores.py": {
            "test_thread_pool_handles_workers_of_different_speed": 1,
        },
        "tests/qtensor/test_fused_matmul.py": {
            "test_fused_matmul_matches_separate_operations": 48,
        },
        "tests/qtensor/test_packing.py": {
            "test_interleaved_gate_and_up_match_unpacked_weights": 10,
        },
    },
    "conversion": {
        "tests/smollm3/conversion/test_converter.py": {
            "test_conversion_to_every_mix_is_reproducible_and_runs": 3,
        },
        "tests/smollm3/conversion/test_quantizer.py": {
            "test_every_mix_is_quantized_equally_from_file_and_folder": 2,
        },
        "tests/smollm3/conversion/test_unusual_folders.py": {
            "test_token_ids_match_the_tokenizers_library": 6,
            "test_rope_and_tensors_of_supported_folders_match_transformers": 12,
        },
    },
    "store": {
        "tests/web/store/test_documents.py": {
            "test_no_row_of_a_deleted_document_stays_in_postgres": 0,
        },
    },
    "chaos": {
        "tests/chaos/test_foreign_sites.py": {
            "test_every_route_enforces_host_and_origin_checks": 0,
        },
        "tests/chaos/test_holes.py": {
            "test_endless_engine_responses_do_not_disrupt_server": 0,
            "test_attacks_with_one_key_do_not_starve_other_users": 4,
            "test_forged_plugin_frames_do_not_disrupt_server": 0,
            "test_imports_beyond_address_space_limit_do_not_crash_server": 0,
        },
        "tests/chaos/test_kills.py": {
            "test_kills_lose_no_acknowledged_writes": 0,
        },
        "tests/chaos/test_rendering_attacks.py": {
            "test_slow_markdown_does_not_block_other_requests": 0,
        },
        "tests/chaos/test_power_loss.py": {
            "test_power_loss_loses_no_acknowledged_data": 0,
        },
    },
    "commands": {
        "tests/cli/test_bench_compare.py": {
            "test_fastest_peer_configuration_is_reported": 0,
            "test_peer_process_exits_when_benchmark_is_killed": 1,
            "test_report_contains_peer_results_and_ratios": 0,
        },
        "tests/cli/test_demo.py": {
            "test_serve_announces_the_demo_model": 0,
            "test_command_without_arguments_starts_the_server": 0,
        },
        "tests/cli/test_interruption.py": {
            "test_closed_stdout_exits_quietly_with_sigpipe_code": 1,
            "test_missing_stdout_is_an_error": 1,
        },
        "tests/cli/test_real_engine.py": {
            "test_closing_stdout_ends_the_run_with_sigpipe_code": 0,
            "test_bench_reports_rates_and_machine_as_documented": 0,
            "test_kernels_and_threads_do_not_change_the_answer": 0,
            "test_perplexity_reports_score_and_divergence": 0,
            "test_invalid_model_file_exits_with_code_3": 2,
        },
        "tests/cli/test_run.py": {
            "test_every_sampling_field_is_an_option": 2,
        },
        "tests/cli/test_serve.py": {
            "test_context_beyond_the_maximum_is_reduced": 0,
            "test_data_directory_in_use_exits_with_code_5": 0,
            "test_api_key_file_enables_authentication": 0,
            "test_port_in_use_exits_with_code_6": 0,
            "test_serve_starts_quickly_and_exits_cleanly_on_signals": 1,
            "test_open_option_opens_the_page": 0,
        },
    },
    "server": {
        "tests/documents/test_reading.py": {
            "test_invalid_parser_frames_are_refused": 4,
        },
        "tests/documents/test_traps.py": {
            "test_bomb_document_ends_within_child_limits": 2,
        },
        "tests/web/api/test_receipts.py": {
            "test_each_api_returns_valid_receipt": 6,
        },
        "tests/web/api/test_volatile_lines.py": {
            "test_other_prompt_changes_miss_prefix_cache": 0,
        },
        "tests/web/chat/test_chat_view.py": {
            "test_long_chat_reads_only_messages_that_fit_the_prompt": 4,
        },
        "tests/web/chat/test_library.py": {
            "test_too_expensive_preview_returns_413": 0,
        },
        "tests/web/chat/test_other_programs.py": {
            "test_damaged_or_hostile_export_is_rejected_with_one_sentence": 6,
            "test_oversized_import_is_rejected": 0,
        },
        "tests/web/chat/test_transfer.py": {
            "test_invalid_import_returns_400_and_adds_no_chats": 3,
        },
        "tests/web/edge/test_fair_shares.py": {
            "test_every_route_serves_modest_owner_beside_greedy_owner": 0,
        },
        "tests/web/edge/test_watchdog.py": {
            "test_blocked_server_is_aborted_with_tracebacks": 1,
            "test_suspended_server_is_not_ended": 0,
        },
        "tests/web/rendering/test_hostile_stream.py": {
            "test_event_reader_fed_single_bytes_gets_the_sent_events": 0,
            "test_hostile_streams_are_safe_at_every_byte_and_match_whole_render": 1,
        },
        "tests/web/rendering/test_rendering.py": {
            "test_hostile_markup_renders_to_safe_html": 25,
            "test_pathological_text_is_rendered_within_time_limit": 8,
            "test_deep_nesting_loses_no_text": 4,
        },
        "tests/web/sign_in/test_quotas.py": {
            "test_concurrent_chat_actions_over_quota_are_rejected_before_storing": 3,
        },
        "tests/web/test_crash.py": {
            "test_answer_resumes_after_kill_and_stopped_answer_can_be_continued": 0,
        },
        "tests/web/test_deployed.py": {
            "test_compose_file_serves_configured_model": 0,
            "test_cluster_compose_file_serves_shared_chats": 0,
            "test_kubernetes_file_serves_configured_model": 0,
            "test_front_end_image_serves_remote_engine": 0,
        },
        "tests/web/test_server.py": {
            "test_shutdown_leaves_long_answer_to_next_process": 0,
            "test_second_signal_ends_server_immediately": 0,
            "test_partial_answer_survives_kill_and_resumes": 0,
        },
        "tests/web/values/test_strict_fields.py": {
            "test_import_file_with_too_many_values_is_rejected": 3,
        },
        "tests/web/api/test_attacks.py": {
            "test_concurrent_streams_survive_client_disconnects": 1,
        },
        "tests/web/api/test_continued_responses.py": {
            "test_background_response_resumes_after_restart": 1,
        },
        "tests/web/sign_in/test_oidc.py": {
            "test_invalid_id_token_is_rejected": 1,
        },
        "tests/web/tools/test_hostile_mcp.py": {
            "test_call_returns_result_or_failure_reason": 5,
        },
        "tests/web/store/test_postgres_outage.py": {
            "test_outage_returns_503_and_keeps_drafts_and_answers": 0,
        },
    },
    "growth": {
        "tests/architecture/test_growth.py": {
            "test_ambiguous_or_quadratic_pattern_is_detected": 1,
            "test_patterns_of_the_package_are_collected": 0,
            "test_pattern_time_grows_in_proportion_to_text_length": 0,
        },
        "tests/architecture/test_growth_of_entries.py": {
            "test_entry_point_time_grows_in_proportion_to_text_length": 10,
        },
    },
    "check": {
        "tests/architecture/test_check_again.py": {
            "test_failed_tests_are_rerun_and_flaky_tests_reported": 2,
        },
    },
    "plants": {
        "tests/architecture/test_plants.py": {
            "test_typical_change_works_and_edits_few_files": 1,
        },
    },
    "programs": {
        "tests/strangers/test_requests.py": {
            "test_each_turn_of_a_session_gets_the_expected_response": 50,
        },
    },
}
"""Group -> test file -> test that takes seconds -> number of its cases that run by default, spread evenly over those
without a `long` mark. The others run with the group. A test with 0 runs only with the group."""

APART = {"clients", "ray", "tune"}
"""Groups that run in separate environments, and are skipped if these cannot be installed. They are recorded only by
`make test-long`."""


def thinned(cases: Iterable[str], marked: Collection[str] = ()) -> dict[str, str]:
    """Return the cases, given as node ids, that do not run by default, each with the group that runs it.

    marked: cases with a `long` mark of their own. The number of a test counts only its other cases.
    """
    of_test: dict[str, list[str]] = {}
    for case in cases:
        if case not in marked:
            of_test.setdefault(case.partition("[")[0], []).append(case)
    found = {}
    for group, files in THINNED.items():
        for file, tests in files.items():
            for test, count in tests.items():
                all_cases = of_test.get(f"{file}::{test}", [])
                kept = {all_cases[at * len(all_cases) // count] for at in range(count)} if all_cases else set()
                found |= {case: group for case in all_cases if case not in kept}
    return found


def is_long(group: str) -> bool:
    """Return whether LONG selects this group."""
    return bool({group, "all"} & {*os.environ.get("LONG", "").split(",")})


def code(source: bytes) -> bytes:
    """Return a Python file without comments, docstrings and blank lines."""
    lines = source.split(b"\n")
    kept: list[bytes | None] = [*lines]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            if not lines[first][: node.col_offset].strip():
                kept[first:last] = [None] * (last - first)
    without_docstrings = b"\n".join(line for line in kept if line is not None)
    return STRING_OR_OMITTED.sub(lambda found: found["string"] or b"", without_docstrings).strip()


@cache
def content(file: Path, whole: bool) -> bytes:
    data = file.read_bytes()
    return data if whole or file.suffix != ".py" else code(data)


def digest(group: str) -> str:
    """Return a digest of the names and contents of a group's files."""
    found = hashlib.sha256()
    for name in GROUPS[group]:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                data = content(file, group in WHOLE_TEXT)
                found.update(f"{file.relative_to(ROOT)}\0{len(data)}\0".encode() + data)
    return found.hexdigest()


def due() -> list[str]:
    """Return the groups with changes since they last passed."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return [group for group in GROUPS if recorded.get(group) != digest(group)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        passed = {*sys.argv[2].split(",")} - APART if sys.argv[2:] else {*GROUPS}
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        known |= {group: digest(group) for group in GROUPS if group in passed}
        RECORD.write_text(json.dumps({group: known[group] for group in GROUPS if group in known}, indent=1) + "\n")
    else:
        sys.stdout.write(",".join(due()) + "\n")
