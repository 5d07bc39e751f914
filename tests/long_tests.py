"""Groups of tests that take minutes, which run only after changes to files that they depend on.

    python tests/long_tests.py             print the groups that are due, for LONG=
    python tests/long_tests.py --record    record that all groups (or those given as a,b) passed on the current files

A group's digest covers its files; tests/long_tests.json contains the digests with which it last passed. `make check`
runs and records the groups whose digest differs; `make test-long` runs and records all. So unchanged code is not tested
again, and changed code is always tested.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterable
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
        "tests/smollm3/engine/test_receipts_elsewhere.py",
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

THINNED: dict[str, dict[str, dict[str, int]]] = {
    "engine": {
        "tests/smollm3/diagnostics/test_goldens.py": {
            "test_a_format_is_allowed_its_own_error_and_no_other": 2,
            "test_a_planted_error_is_noticed": 1,
        },
        "tests/smollm3/engine/test_answers_across_devices.py": {
            "test_every_answer_is_the_same": 0,
        },
        "tests/smollm3/engine/test_determinism.py": {
            "test_kernels_threads_and_pieces_change_no_bit": 3,
            "test_sampled_answers_are_the_same_under_every_kernel": 3,
        },
        "tests/smollm3/engine/test_prefix_warmup.py": {
            "test_all_but_the_words_is_there": 2,
            "test_chats_side_by_side_say_what_each_says_alone": 1,
        },
        "tests/smollm3/engine/test_receipts.py": {
            "test_an_untouched_receipt_is_drawn_again": 5,
        },
        "tests/smollm3/engine/test_receipts_elsewhere.py": {
            "test_another_family_draws_them_again": 1,
        },
        "tests/smollm3/engine/test_replay.py": {
            "test_an_answer_goes_on_from_each_of_its_tokens": 5,
            "test_a_branch_is_what_a_cold_engine_writes_behind_the_same_tokens": 1,
        },
        "tests/smollm3/engine/test_reread.py": {
            "test_cold_and_kept_give_the_same_bits": 1,
        },
        "tests/smollm3/engine/test_speculative_prefill.py": {
            "test_what_is_typed_last_takes_its_beginning_up": 2,
            "test_what_was_typed_is_there_when_it_is_sent": 2,
        },
        "tests/smollm3/kv/test_offload.py": {
            "test_after_a_restart_a_conversation_is_there_to_the_last_token": 1,
            "test_damaged_files_cost_time_and_nothing_else": 1,
        },
        "tests/smollm3/model/test_backends.py": {
            "test_float_weights_have_the_same_bits": 0,
            "test_every_step_of_the_demo_model_has_the_same_bits": 1,
            "test_what_one_backend_wrote_to_the_disk_another_goes_on_with": 1,
        },
        "tests/smollm3/model/test_every_format.py": {
            "test_a_model_answers_alike_in_every_family": 3,
        },
        "tests/smollm3/model/test_public_files.py": {
            "test_a_file_of_each_row": 10,
        },
        "tests/smollm3/sampling/test_patterns.py": {
            "test_node_agrees_on_generated_patterns": 1,
        },
        "tests/smollm3/sampling/test_rare_filters.py": {
            "test_frequencies_are_the_probabilities": 1,
        },
        "tests/smollm3/sampling/test_sampler.py": {
            "test_frequencies_are_the_probabilities": 2,
            "test_many_faint_tokens_move_the_end_of_the_nucleus": 6,
        },
        "tests/smollm3/sampling/test_schemas.py": {
            "test_what_is_valid_may_be_written_and_nothing_else": 13,
        },
        "tests/smollm3/sampling/test_strict_tools.py": {
            "test_whatever_is_drawn_a_call_follows_its_tool": 2,
        },
        "tests/smollm3/sampling/test_token_limit.py": {
            "test_a_model_ends_twenty_of_twenty": 1,
            "test_the_work_near_the_limit_is_bounded": 0,
            "test_what_can_end_within_its_limit_does": 24,
        },
        "tests/smollm3/text/test_chat_template.py": {
            "test_what_a_template_leaves_out_is_found_by_showing_it": 1,
            "test_known_templates_run_here_and_others_apart": 1,
        },
        "tests/smollm3/text/test_template_sandbox.py": {
            "test_what_a_template_must_not_do": 10,
            "test_what_the_official_templates_rely_on": 4,
            "test_a_name_that_is_not_given_is_an_error_that_names_it": 4,
        },
        "tests/smollm3/text/test_tokenizer_official.py": {
            "test_a_long_text_costs_what_its_eighths_cost": 0,
            "test_ids_are_the_library_s": 1,
            "test_it_builds_about_as_fast_as_the_library": 0,
        },
        "tests/smollm3/text/test_tokenizer.py": {
            "test_time_is_near_linear_in_length": 4,
        },
        "tests/smollm3/sampling/test_quotes.py": {
            "test_a_hostile_text_costs_no_more_per_token": 2,
        },
        "tests/smollm3/engine/test_memory_plan.py": {
            "test_the_format_goes_by_the_file_and_is_kept_in_the_folder": 2,
        },
        "tests/smollm3/model/test_parity.py": {
            "test_an_adapter_gives_the_logits_of_peft": 1,
        },
        "tests/smollm3/kv/test_disk_store_damage.py": {
            "test_thousands_of_accidents_are_found": 1,
        },
    },
    "native": {
        "tests/qtensor/test_kernels_attention_bytes.py": {
            "test_the_bits_of_the_twin": 7,
        },
        "tests/qtensor/test_kernels_matmul.py": {
            "test_extremes_do_not_overflow": 8,
            "test_families_agree": 40,
            "test_long_rows": 8,
            "test_panels_of_many_rows": 8,
        },
        "tests/qtensor/test_threads.py": {
            "test_products": 8,
        },
        "tests/qtensor/test_uneven_cores.py": {
            "test_the_pool_with_workers_that_differ": 1,
        },
        "tests/qtensor/test_fused_matmul.py": {
            "test_fused_equals_single_operations": 48,
        },
        "tests/qtensor/test_packing.py": {
            "test_gate_and_up_in_turns": 10,
        },
    },
    "conversion": {
        "tests/smollm3/conversion/test_converter.py": {
            "test_every_mix_is_made_and_runs": 3,
        },
        "tests/smollm3/conversion/test_quantizer.py": {
            "test_every_mix_is_made_of_a_file_and_of_a_folder": 2,
        },
        "tests/smollm3/conversion/test_unusual_folders.py": {
            "test_a_tokenizer_gives_the_ids_that_its_own_library_gives": 6,
            "test_rotation_and_tensors_of_what_is_computed": 12,
        },
    },
    "store": {
        "tests/web/store/test_documents.py": {
            "test_no_row_of_a_deleted_document_stays_in_postgres": 0,
        },
    },
    "chaos": {
        "tests/chaos/test_foreign_sites.py": {
            "test_every_cell_of_sites_and_routes_is_as_written": 0,
        },
        "tests/chaos/test_holes.py": {
            "test_an_engine_whose_body_has_no_end": 0,
            "test_attacks_of_one_key": 4,
            "test_frames_that_a_plugin_forges": 0,
            "test_imports_beyond_the_address_space": 0,
        },
        "tests/chaos/test_kills.py": {
            "test_kills_lose_nothing_that_was_acknowledged": 0,
        },
        "tests/chaos/test_rendering_attacks.py": {
            "test_a_chat_that_is_slow_to_lay_out": 0,
        },
        "tests/chaos/test_power_loss.py": {
            "test_power_loss_loses_nothing_that_was_acknowledged": 0,
        },
    },
    "commands": {
        "tests/cli/test_bench_compare.py": {
            "test_the_fastest_configuration_counts": 0,
            "test_the_peer_ends_with_us_however_we_end": 1,
            "test_the_peer_stands_beside_our_figures": 0,
        },
        "tests/cli/test_demo.py": {
            "test_serve_says_that_the_demo_will_answer": 0,
            "test_without_arguments_the_chat_opens": 0,
        },
        "tests/cli/test_interruption.py": {
            "test_a_closed_pipe_ends_quietly_with_the_code_of_sigpipe": 1,
            "test_a_missing_stdout_is_no_success": 1,
        },
        "tests/cli/test_real_engine.py": {
            "test_a_reader_that_leaves_in_the_middle_ends_it": 0,
            "test_bench_gives_rates_and_the_machine": 0,
            "test_kernels_and_threads_do_not_change_the_answer": 0,
            "test_perplexity_and_divergence": 0,
            "test_what_is_no_model_is_told_with_exit_code_3": 2,
        },
        "tests/cli/test_run.py": {
            "test_every_sampling_field_is_an_option": 2,
        },
        "tests/cli/test_serve.py": {
            "test_a_context_too_large_is_reduced_to_the_maximum": 0,
            "test_a_data_directory_in_use_is_exit_code_5": 0,
            "test_a_key_from_a_file_is_asked_for": 0,
            "test_a_port_in_use_is_exit_code_6": 0,
            "test_it_serves_at_once_until_told_to_stop": 1,
            "test_the_page_is_opened_when_asked_for": 0,
        },
    },
    "server": {
        "tests/documents/test_reading.py": {
            "test_a_parser_that_was_taken_over_is_not_believed": 4,
        },
        "tests/documents/test_traps.py": {
            "test_a_bomb_ends_within_the_childs_limits": 2,
        },
        "tests/web/api/test_receipts.py": {
            "test_each_api_gives_a_receipt_that_holds": 6,
        },
        "tests/web/api/test_volatile_lines.py": {
            "test_nothing_is_found_behind_any_other_change": 0,
        },
        "tests/web/chat/test_chat_view.py": {
            "test_what_is_done_in_a_long_chat_reads_what_a_prompt_has_room_for": 4,
        },
        "tests/web/chat/test_library.py": {
            "test_a_preview_that_costs_too_much_says_so": 0,
        },
        "tests/web/chat/test_other_programs.py": {
            "test_a_damaged_or_hostile_export_ends_in_one_sentence": 6,
            "test_two_hundred_megabytes_end_in_one_sentence": 0,
        },
        "tests/web/chat/test_transfer.py": {
            "test_what_is_broken_is_refused_whole": 3,
        },
        "tests/web/edge/test_fair_shares.py": {
            "test_at_every_route_a_modest_owner_is_served_beside_a_greedy_one": 0,
        },
        "tests/web/edge/test_watchdog.py": {
            "test_a_server_that_is_held_is_ended_with_its_tracebacks": 1,
            "test_a_server_that_is_stopped_is_not_ended": 0,
        },
        "tests/web/rendering/test_hostile_stream.py": {
            "test_a_reader_of_single_bytes_gets_the_events_that_were_sent": 0,
            "test_every_cut_of_every_text_is_clean_and_the_end_is_the_whole": 1,
        },
        "tests/web/rendering/test_rendering.py": {
            "test_hostile_text_is_shown_and_not_obeyed": 25,
            "test_no_text_is_slow": 8,
            "test_nothing_is_lost_in_the_deep_nor_behind_it": 4,
        },
        "tests/web/sign_in/test_quotas.py": {
            "test_forty_at_once_of_what_continues_a_chat_are_refused_before_they_are_stored": 3,
        },
        "tests/web/test_crash.py": {
            "test_a_killed_server_has_the_part_and_goes_on": 0,
        },
        "tests/web/test_deployed.py": {
            "test_compose": 0,
            "test_compose_of_a_cluster": 0,
            "test_kubernetes": 0,
            "test_the_front_end_s_image": 0,
        },
        "tests/web/test_server.py": {
            "test_a_long_answer_is_left_to_the_next_start_and_streams_end": 0,
            "test_a_second_signal_ends_it_at_once": 0,
            "test_after_kill_9_the_partial_answer_is_there_and_goes_on": 0,
        },
        "tests/web/values/test_strict_fields.py": {
            "test_a_file_of_much_of_nothing_is_refused_by_its_counts": 3,
        },
        "tests/web/api/test_attacks.py": {
            "test_many_clients_at_once_and_a_third_of_them_leave": 1,
        },
        "tests/web/api/test_continued_responses.py": {
            "test_a_response_in_the_background_goes_on": 1,
        },
        "tests/web/sign_in/test_oidc.py": {
            "test_a_token_that_is_wrong_lets_nobody_in": 1,
        },
        "tests/web/tools/test_hostile_mcp.py": {
            "test_a_call_gets_its_answer_or_a_reason": 5,
        },
        "tests/web/store/test_postgres_outage.py": {
            "test_what_a_person_sees": 0,
        },
    },
    "growth": {
        "tests/architecture/test_growth.py": {
            "test_a_pattern_that_was_ambiguous_or_quadratic_is_found": 1,
            "test_the_patterns_of_the_package_are_found": 0,
            "test_no_pattern_takes_time_out_of_proportion": 0,
        },
        "tests/architecture/test_growth_of_entries.py": {
            "test_an_entry_takes_time_in_proportion": 10,
        },
    },
    "check": {
        "tests/architecture/test_check_again.py": {
            "test_what_fails_runs_once_more": 2,
        },
    },
    "plants": {
        "tests/architecture/test_plants.py": {
            "test_a_planted_change_works_and_needs_few_files": 1,
        },
    },
    "programs": {
        "tests/strangers/test_requests.py": {
            "test_each_turn_is_answered_with_what_it_asks_for": 50,
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


def digest(group: str) -> str:
    """Return a digest of the names and contents of a group's files."""
    found = hashlib.sha256()
    for name in GROUPS[group]:
        path = ROOT / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file.relative_to(ROOT)}\0{len(file.read_bytes())}\0".encode() + file.read_bytes())
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
